"""Random calls of an encoder: shapes, masks, flags, dtypes, threads, and models that change between the calls.

The results are compared with those of a twin that is never recorded, and some of them with stock. All results are kept,
and later calls must not change them.
"""

from __future__ import annotations

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple

import peft
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_rocm
from tests.forwards.conftest import equal, tensors
from tests.forwards.families import make, random_call, random_kind
from tests.releases import NEWEST

CALLS = 120
# Number of consecutive calls whose shapes and flags are chosen from the same one or two kinds.
KINDS = 40
MODES = (torch.no_grad, torch.inference_mode)
MASKS = (torch.long, torch.long, torch.int32, torch.bool)
ADAPTERS = ("first", "second", None)

# Changes to the models, by the fraction of the calls that run before the change.
CHANGES = {
    0.1: lambda models: models.change(_write),
    0.2: lambda models: models.change(_move),
    0.3: lambda models: models.change(_replace),
    0.4: lambda models: models.change(_adapt),
    0.6: lambda models: models.to(torch.bfloat16),
    0.8: lambda models: models.to(torch.float16),
}


class Models:
    """The recorded model, its twin (with the same kernels, but never recorded), and stock."""

    def __init__(self, name, device="cpu"):
        self.stock = make(name).to(device)
        self.prepared = hf_rocm.prepare(copy.deepcopy(self.stock), force=True)
        self.twin = hf_rocm.prepare(copy.deepcopy(self.stock), force=True, graphs=False)
        self.dtype, self.device = torch.float32, device
        self.adapted = False

    def change(self, function):
        for model in (self.prepared, self.twin, self.stock):
            torch.manual_seed(7)
            function(model)
        self.adapted = self.adapted or function is _adapt

    def to(self, dtype):
        self.dtype = dtype
        self.change(lambda model: model.to(dtype))

    def converted(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)


class Call(NamedTuple):
    args: tuple
    arguments: dict
    mode: type

    def __call__(self, model):
        with self.mode():
            return model(*self.args, **self.arguments)


def differing(name, *, same, lengths=None, calls=CALLS, device="cpu", seed=0):
    """Run random calls of a family. Returns (the models, the differences).

    same(result, expected, dtype) compares results. lengths: a range for random lengths, or None for a few shapes.
    """
    models, rng = Models(name, device), random.Random(f"{name} {seed} {lengths}")
    changes = {round(share * calls): change for share, change in CHANGES.items()}
    differences, kept, number, next_kinds = [], [], 0, 0
    while number < calls:
        for position in [position for position in changes if position <= number]:
            changes.pop(position)(models)
        if models.adapted and rng.random() < 0.05:
            chosen = rng.choice(ADAPTERS)
            models.change(lambda model, chosen=chosen: _use(model, chosen))
        if number >= next_kinds:
            kinds = [_random_kind(name, rng) for _ in range(1 if lengths else 2)]
            next_kinds += KINDS
        count = min(rng.choice((1, 1, 1, 1, 3)), calls - number)
        batch = [_drawn(models, name, rng.choice(kinds), rng, lengths) for _ in range(count)]
        before = copy.deepcopy([(call.args, call.arguments) for call in batch])
        results = _results(models, batch)
        for index, (call, result) in enumerate(zip(batch, results, strict=True), number):
            if not _agree(models, call, result, same, with_stock=index % 10 == 0):
                differences.append(f"call {index}: {models.dtype}, {list(call.arguments)}")
            kept.append((result, [tensor.clone() for tensor in tensors(result)]))
        after = [(call.args, call.arguments) for call in batch]
        if not all(map(_equal_inputs, before, after)):
            differences.append(f"call {number}: an input was written to")
        number += count
    for index, (result, values) in enumerate(kept):
        if not all(torch.equal(*both) for both in zip(tensors(result), values, strict=True)):
            differences.append(f"the result of call {index} was changed by a later call")
    return models, differences


def _random_kind(name, rng):
    return {**random_kind(name, rng), "mode": rng.choice(MODES), "mask": rng.choice(MASKS)}


def _drawn(models, name, kind, rng, lengths):
    kind = kind if lengths is None else {**kind, "length": rng.choice(lengths)}
    args, arguments = random_call(name, kind, rng)
    if "attention_mask" in arguments:
        arguments["attention_mask"] = arguments["attention_mask"].to(kind["mask"])
    arguments = {key: models.converted(value) for key, value in arguments.items()}
    return Call(tuple(map(models.converted, args)), arguments, kind["mode"])


def _results(models, batch):
    """The results of the recorded model. Several calls run in threads if all of them may run concurrently."""
    if len(batch) == 1 or not all(map(_may_be_concurrent, batch)):
        return [call(models.prepared) for call in batch]

    def work(call):
        with torch.cuda.stream(torch.cuda.Stream()) if models.device == "cuda" else nullcontext():
            result = call(models.prepared)
            if models.device == "cuda":
                torch.cuda.current_stream().synchronize()
            return result

    if models.device == "cuda":
        # The inputs were created on another stream.
        torch.cuda.synchronize()
    with ThreadPoolExecutor(len(batch)) as pool:
        return list(pool.map(work, batch))


def _may_be_concurrent(call):
    """Whether a call may run at the same time as others.

    To collect hidden states, earlier releases replace the forwards of modules, so concurrent calls would collect each
    other's states.
    """
    return NEWEST or "output_hidden_states" not in call.arguments


def _agree(models, call, result, same, *, with_stock):
    agree = same(result, call(models.twin), models.dtype)
    # Under a dispatch mode, PyTorch runs some operators with other kernels, which round differently.
    if not agree:
        with PassThrough():
            agree = same(result, call(models.twin), models.dtype)
    return agree and (not with_stock or close(result, call(models.stock), models.dtype))


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


def exactly(result, expected, dtype):
    return equal(result, expected)


def close(result, expected, dtype):
    """Whether two outputs are equal except for rounding differences between kernels."""
    ones, others = tensors(result), tensors(expected)
    assert type(result) is type(expected) and len(ones) == len(others) and ones
    scale = 64 * torch.finfo(dtype).eps
    return all(
        one.shape == other.shape
        and one.dtype is other.dtype
        and torch.allclose(one.float(), other.float(), rtol=scale, atol=scale * float(other.float().abs().max()))
        for one, other in zip(ones, others, strict=True)
    )


def _equal_inputs(before, after):
    """Compare (args, arguments) before and after a call."""
    pairs = zip((*before[0], *before[1].values()), (*after[0], *after[1].values()), strict=True)
    return all(torch.equal(*pair) if isinstance(pair[0], torch.Tensor) else pair[0] == pair[1] for pair in pairs)


def _write(model):
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.25)


def _move(model):
    parameter = list(model.parameters())[-1]
    parameter.data = parameter.data * 0.5


def _replace(model):
    linear = next(module for module in model.modules() if type(module) is torch.nn.Linear)
    linear.weight = torch.nn.Parameter(linear.weight.detach() * 0.75)


def _adapt(model):
    names = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and "layer" in name]
    for adapter in ADAPTERS[:2]:
        model.add_adapter(peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False), adapter)
    model.eval()


def _use(model, adapter):
    if adapter is None:
        model.disable_adapters()
    else:
        model.enable_adapters()
        model.set_adapter(adapter)
