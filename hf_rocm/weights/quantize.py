"""quantize: the linear layers of a model's blocks in 8 bits, in place, and the ways back.

Weights get one scale for each output channel, activations one for each token at each call. Embeddings, norms, the head,
routers and experts keep their dtype, and whatever can't be quantised is left alone and listed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_rocm import options
from hf_rocm.device import describe, is_rocm
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops.eight_bit import INT8, fp8_of, shuffle_rows
from hf_rocm.ops.quantized import QuantizedSpec, choose, shuffle_refuses
from hf_rocm.overlay import bind
from hf_rocm.weights.fuse import MOVED, STATE, fuse
from hf_rocm.weights.preshuffle import unshuffle
from hf_rocm.weights.quantize_plan import Group, plan
from hf_rocm.weights.quantized import GROUP, QuantizedLinear, QuantizedWeight

ModelT = TypeVar("ModelT", bound=nn.Module)

KINDS = ("fp8", "int8")

# What was done, as plain builtins in the model's __dict__, for `explain`.
REPORT = "_hf_rocm_quantization"

_SAMPLES = 8  # rows of the random input that measures a layer

_log = logging.getLogger("hf_rocm")


def quantize(
    model: ModelT,
    kind: str,
    *,
    keep: str | None = None,
    exclude: Sequence[str] = (),
    force: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ModelT:
    """Bring the linear layers of a loaded model's blocks to 8 bits, in place; returns the model.

    kind: `fp8` (MI300 and up) or `int8`. keep: `cpu` keeps the originals in host memory, so that `restore` can bring
    them back; None lets them go. exclude: names or patterns of layers to leave, such as `down_proj` or
    `model.layers.0.*`. force: as for `prepare`. progress: called with (done, total) groups.
    All parameters that remain stop requiring gradients. Memory peaks at one group above what it was.
    Raises `OptionError` on what can't be honoured: another kind, a GPU without fp8, a quantised model, training mode.
    """
    _check(model, kind, keep, force)
    format = _format_for(model, kind)
    found, left = plan(model, exclude)
    if not found:
        raise OptionError(
            "this model has no layer that can be quantised",
            facts=dict(list(left.items())[:5]),
            hint="only nn.Linear layers inside repeated blocks are quantised",
        )
    before = _nbytes(model)
    errors: dict[str, float] = {}
    warns = True
    with torch.inference_mode(False), torch.no_grad():
        for done, group in enumerate(found):
            errors.update(_quantize(group, format, keep is not None, warns=warns))
            warns = False
            if progress is not None:
                progress(done + 1, len(found))
    worst = max(errors, key=errors.__getitem__)
    model.__dict__[REPORT] = {
        "kind": kind,
        "format": str(format).removeprefix("torch."),
        "layers": len(errors),
        "left": left,  # layer: why it keeps its dtype
        "kept": keep,
        "bytes": [before, _nbytes(model)],
        "error": {"mean": sum(errors.values()) / len(errors), "max": errors[worst], "worst": worst},
        "froze": _freeze(model),
    }
    _log.info("%s: %s", type(model).__name__, summary(model))
    return model


def summary(model: nn.Module) -> str | None:
    """What was quantised and what it cost, in a sentence; None for a model that isn't in 8 bits."""
    report = model.__dict__.get(REPORT)
    if report is None:
        return None
    before, after = (each / 2**20 for each in report["bytes"])
    error = report["error"]
    return (
        f"{report['layers']} layers in {report['kind']} ({report['format']}), {before:.0f} MiB before and {after:.0f} "
        f"after; their outputs are off by {error['mean']:.1%} on average, {error['max']:.1%} at most ({error['worst']})"
    )


def dequantize(model: ModelT) -> ModelT:
    """Make ordinary `nn.Linear` layers again, in place; returns the model.

    With `keep="cpu"` they are the originals; else they hold what the 8 bits stand for, in their old dtype.
    """
    report = model.__dict__.pop(REPORT, None) or {}
    for module in model.modules():
        for name, child in list(module._modules.items()):
            if isinstance(child, QuantizedLinear):
                module._modules[name] = child.original()
        names = module.__dict__.pop(GROUP, None)
        if names is not None and bind.mode_of(module) != bind.OFF:
            fuse(module, names)
    parameters = dict(model.named_parameters())
    for name in report.get("froze", ()):
        if name in parameters:
            parameters[name].requires_grad_()
    return model


def bring_back(model: nn.Module) -> None:
    """What `restore` does about 8 bits. Raises `OptionError` if the originals are gone; then nothing has changed."""
    gone = [path for path, layer in layers(model) if not layer.kept]
    if gone:
        raise OptionError(
            "this model was quantised, and its original weights are gone",
            facts={"layers": f"{len(gone)}, {gone[0]} the first"},
            hint='load it again, or quantise with keep="cpu"; hf_rocm.dequantize(model) makes ordinary layers of the '
            "rounded weights, and then restore works",
        )
    dequantize(model)


def layers(model: nn.Module) -> list[tuple[str, QuantizedLinear]]:
    """The 8-bit layers by name."""
    return [(path, module) for path, module in model.named_modules() if isinstance(module, QuantizedLinear)]


def _check(model: nn.Module, kind: str, keep: str | None, force: bool | None) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(
            "quantize takes a model",
            facts={"expected": "a torch.nn.Module", "found": type(model).__qualname__},
            hint="a pipeline has its model in `.model`",
        )
    check_options(kind, keep, force)
    if layers(model):
        raise OptionError("this model is in 8 bits already", facts={"it has": summary(model) or "8-bit layers"})
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None or getattr(model, "hf_quantizer", None) is not None:
        method = getattr(config, "quant_method", None) or getattr(model, "quantization_method", "another library")
        raise OptionError(
            f"this model is quantised already, by {getattr(method, 'value', method)}",
            hint="load the checkpoint without quantization_config, or one that isn't quantised",
        )
    if model.training:
        raise OptionError(
            "8-bit weights don't train, and the model is in training mode", hint="call model.eval() first"
        )


def check_options(kind: str, keep: str | None = None, force: bool | None = None) -> None:
    """Raises `OptionError` on what can be known to be impossible before a model is loaded."""
    if kind not in KINDS:
        raise OptionError(f"quantize has no kind {kind!r}", facts={"known": ", ".join(KINDS)})
    if keep not in (None, "cpu"):
        raise OptionError(f"quantize can't keep the originals on {keep!r}", facts={"allowed": 'None or "cpu"'})
    if force is False or not (force or options.force_requested() or is_rocm()):
        raise OptionError(
            "quantize belongs to the ROCm path, which is off",
            facts={"because": "force=False" if force is False else "this PyTorch is not a ROCm build"},
            hint="force=True or HF_ROCM_FORCE=1 switches it on anywhere",
        )


def _format_for(model: nn.Module, kind: str) -> torch.dtype:
    if kind == "int8":
        return INT8
    device = next((each.device for each in model.parameters() if each.is_cuda), None)
    if device is None and is_rocm() and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())  # where a model on the CPU is about to go
    facts = describe(device or torch.device("cpu"))
    format = fp8_of(facts)
    if format is None:
        raise OptionError(
            f"{facts.arch} has no fp8",
            facts={"fp8": "MI300 and up: gfx942, gfx950"},
            hint="int8 is for MI200 too: quantize='int8'",
        )
    return format


def _quantize(group: Group, format: torch.dtype, keep: bool, *, warns: bool) -> dict[str, float]:
    """Replace the layers of a group. Returns how far each output is off on a random input, relative to its size."""
    module, names = group.module, group.names
    unshuffle(module)
    linears: list[Any] = [module._modules[name] for name in names]
    sample = _sample(linears[0].weight)
    expected = [F.linear(sample, each.weight, each.bias) for each in linears]
    held = _round(linears, format)
    # a fused block is let go of as its parameters leave it
    module.__dict__.pop(STATE, None)
    module.__dict__.pop(MOVED, None)
    errors, start = {}, 0
    for name, linear, wanted in zip(names, linears, expected, strict=True):
        layer = QuantizedLinear(linear, held, start, warns=warns and not start)
        _empty(linear, keep)
        module._modules[name] = layer
        start += layer.out_features
        path = f"{group.path}.{name}" if group.path else name
        errors[path] = _off(layer(sample), wanted)
    if len(names) > 1:
        module.__dict__[GROUP] = names
    if held.scale.is_cuda:
        torch.cuda.empty_cache()  # what was freed is of other sizes than what comes next
    return errors


def _round(linears: Sequence[Any], format: torch.dtype) -> QuantizedWeight:
    first = linears[0].weight
    n, k = sum(each.out_features for each in linears), first.shape[1]
    held = QuantizedWeight(
        torch.empty((n, k), dtype=format, device=first.device),
        torch.empty(n, dtype=torch.float32, device=first.device),
        None if linears[0].bias is None else torch.cat([each.bias.detach() for each in linears]),
        shuffled=False,
    )
    start = 0
    for linear in linears:
        held.write(start, linear.weight.detach())
        start += linear.out_features
    if _is_better_shuffled(first, format, n, linears[0].bias):
        held.data = shuffle_rows(held.data)
        held.shuffled = True
    return held


def _is_better_shuffled(weight: Tensor, format: torch.dtype, n: int, bias: Tensor | None) -> bool:
    """Whether aiter's product on weights in its own order serves, which it does in place: it costs no memory."""
    device = describe(weight.device)
    bias_dtype = None if bias is None else bias.dtype
    spec = QuantizedSpec(weight.dtype, format, weight.device, n, weight.shape[1], bias_dtype, True)
    if not device.rocm or shuffle_refuses(spec, device) is not None:
        return False
    try:
        return choose(spec)[0] == "aiter"
    except TierUnavailable:
        return False


def _empty(linear: nn.Linear, keep: bool) -> None:
    """Let go of a layer's weights, or keep them in host memory."""
    for name, parameter in list(linear.named_parameters()):
        with torch.inference_mode(parameter.is_inference()):
            data = parameter.data
            # on the CPU the clone is memory of its own, apart from a fused block or a mapped file
            parameter.data = data.cpu().clone() if keep and name == "weight" else data.new_empty(0)
            parameter.grad = None


def _sample(weight: Tensor) -> Tensor:
    """Normal numbers, the same for each width, without touching the user's random state."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_SAMPLES, weight.shape[1], generator=generator).to(weight.device, weight.dtype)


def _off(actual: Tensor, wanted: Tensor) -> float:
    wanted = wanted.float()
    size = wanted.norm().item()
    return (actual.float() - wanted).norm().item() / size if size else 0.0


def _freeze(model: nn.Module) -> list[str]:
    """Without it a bare call of the model would ask the 8-bit layers for gradients. Returns what required them."""
    required = [name for name, each in model.named_parameters() if each.requires_grad]
    for name in required:
        model.get_parameter(name).requires_grad_(False)
    return required


def _nbytes(model: nn.Module) -> int:
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
