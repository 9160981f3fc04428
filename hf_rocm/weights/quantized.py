"""Linear layers in 8 bits: the modules that take the places of `nn.Linear`, and the product of a whole group.

The 8-bit rows of layers that read the same input lie in one `QuantizedWeight`, which all of them hold: called one by
one they multiply their own rows, and `product` multiplies all at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hf_rocm import ops
from hf_rocm.ops.eight_bit import dequantize_rows, quantize_rows, shuffle_rows, unshuffle_rows
from hf_rocm.ops.quantized import QuantizedSpec

# In the __dict__ of a module: the names of its children that lie in one `QuantizedWeight`.
GROUP = "_hf_rocm_quantized"

CHUNK = 2**22  # elements that are rounded at once: in fp32 they take 16 MiB

_hooks_on_all = torch_module._global_forward_hooks
_pre_hooks_on_all = torch_module._global_forward_pre_hooks

_log = logging.getLogger("hf_rocm")


class QuantizedWeight(nn.Module):
    """data: [N, K] int8 or fp8, perhaps in aiter's order; scale: [N] fp32; bias: [N] or None.

    Its buffers are no part of a state dict: the layers put the weights there in their own dtype.
    """

    data: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, data: Tensor, scale: Tensor, bias: Tensor | None, *, shuffled: bool) -> None:
        super().__init__()
        self.register_buffer("data", data, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.shuffled = shuffled

    def forward(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """The outputs of the rows from start to stop: [..., stop - start] for x: [..., K]."""
        held: Any = self._buffers  # an attribute of a module takes longer to find
        data, scale, bias = held["data"], held["scale"], held["bias"]
        if start or stop is not None:
            data, scale = data[start:stop], scale[start:stop]
            bias = None if bias is None else bias[start:stop]
        if torch.is_autocast_enabled(x.device.type):  # as F.linear does
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return ops.quantized_linear(x, data, scale, bias, shuffled=self.shuffled)

    def read(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """These rows as what they stand for, a new tensor [stop - start, K]."""
        rows = self.data[start:stop]
        return dequantize_rows(unshuffle_rows(rows) if self.shuffled else rows, self.scale[start:stop], dtype)

    def write(self, start: int, weight: Tensor) -> None:
        """Round a weight [N_i, K] into the rows from start on, a few at a time."""
        step = max(16, CHUNK // weight.shape[1] // 16 * 16)  # a shuffled tile has 16 rows
        for first in range(0, len(weight), step):
            part = weight[first : first + step].to(self.scale.device)
            rows, scale = quantize_rows(part, self.data.dtype)
            place = slice(start + first, start + first + len(part))
            self.data[place] = shuffle_rows(rows) if self.shuffled else rows
            self.scale[place] = scale.flatten()

    def __getstate__(self) -> dict[str, Any]:
        # plain pickle knows no fp8
        buffers = {**self._buffers, "data": self.data.view(torch.int8)}
        return {**self.__dict__, "_buffers": buffers, "format": self.data.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        format = state.pop("format")
        super().__setstate__(state)
        self._buffers["data"] = self.data.view(format)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedWeight:
        """`.to()` and the like move the 8 bits and their scales, but never change their dtypes."""
        device = fn(self.scale.new_empty(0)).device
        for name in ("data", "scale"):
            self._buffers[name] = getattr(self, name).to(device)
        if self.bias is not None:
            self._buffers["bias"] = fn(self.bias)
        return self


class QuantizedLinear(nn.Module):
    """In the place of an `nn.Linear`: some rows of a `QuantizedWeight`.

    state dicts hold the weight in its own dtype, on the CPU: what the 8 bits stand for, or the original if it was kept.
    A weight that is loaded is rounded again.
    """

    quantized: QuantizedWeight

    def __init__(self, linear: nn.Linear, quantized: QuantizedWeight, start: int, *, warns: bool) -> None:
        super().__init__()
        self.quantized = quantized
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.start = start
        self.dtype = linear.weight.dtype
        self.replaced = (linear,)  # in a tuple: it is no child; its parameters are empty, or on the CPU if kept
        self.follows = "_hf_hook" in linear.__dict__  # accelerate brought the input to this layer's device
        self.warns = warns
        self.training = linear.training

    def forward(self, x: Tensor) -> Tensor:
        if self.follows:
            x = x.to(self.quantized.scale.device)
        alone = self.out_features == len(self.quantized.scale)
        rows = () if alone else (self.start, self.start + self.out_features)
        result: Tensor = self.quantized(x, *rows)
        return result

    @property
    def weight(self) -> Tensor:
        """What the 8 bits stand for, a new tensor at each access: [N, K] in the dtype that the layer had."""
        return self.quantized.read(self.start, self.start + self.out_features, self.dtype)

    @property
    def bias(self) -> Tensor | None:
        bias = self.quantized.bias
        return None if bias is None else bias[self.start : self.start + self.out_features]

    @property
    def kept(self) -> bool:
        """Whether the original is still there, on the CPU."""
        return self.replaced[0].weight.numel() > 0

    def original(self) -> nn.Linear:
        """The layer that this one replaced, with the original parameters, or with what the 8 bits stand for."""
        linear = self.replaced[0]
        device = self.quantized.scale.device
        with torch.no_grad(), torch.inference_mode(linear.weight.is_inference()):
            weight = linear.weight.data.to(device, self.dtype) if self.kept else self.weight
            linear.weight.data = weight
            if linear.bias is not None and self.bias is not None:
                linear.bias.data = self.bias.clone()
        return linear

    def extra_repr(self) -> str:
        kind = str(self.quantized.data.dtype).removeprefix("torch.")
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.warns and not self.kept:
            _log.warning("the state dict of an 8-bit model holds its rounded weights in %s", self.dtype)
        weight = self.replaced[0].weight.detach() if self.kept else self.weight.cpu()
        destination[prefix + "weight"] = weight.to(self.dtype)
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias.cpu()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected = {"weight": (self.out_features, self.in_features)}
        if self.bias is not None:
            expected["bias"] = (self.out_features,)  # type: ignore[assignment]
        for name, shape in expected.items():
            value = state_dict.get(prefix + name)
            if value is None:
                if strict:
                    missing_keys.append(prefix + name)
            elif tuple(value.shape) != shape:
                error_msgs.append(
                    f"size mismatch for {prefix}{name}: {list(value.shape)} given, {list(shape)} expected"
                )
            else:
                self._take(name, value)
        if strict:
            known = [prefix + name for name in (*expected, "quantized.")]
            unexpected_keys += [
                key for key in state_dict if key.startswith(prefix) and not key.startswith(tuple(known))
            ]

    @torch.no_grad()
    def _take(self, name: str, value: Tensor) -> None:
        if name == "weight":
            self.quantized.write(self.start, value)
            if self.kept:
                self.replaced[0].weight.data.copy_(value)
        elif self.bias is not None:
            self.bias.copy_(value)


def group_of(module: nn.Module) -> QuantizedWeight | None:
    """The weight in which the module's group lies, if all of it would run as one at this moment."""
    own = module.__dict__
    names = own.get(GROUP)
    if names is None or _hooks_on_all or _pre_hooks_on_all:
        return None
    children = own["_modules"]
    held = None
    for name in names:
        child = children.get(name)
        if child.__class__ is not QuantizedLinear:
            return None
        its = child.__dict__
        if its["_forward_hooks"] or its["_forward_pre_hooks"] or "forward" in its:
            return None
        weight: QuantizedWeight = its["_modules"]["quantized"]
        if held is not None and weight is not held:
            return None
        held = weight
    return held


def product(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """The outputs of a quantised group side by side, and their sizes; None when its layers must be called."""
    held = group_of(module)
    if held is None:
        return None
    children: Any = module._modules
    first = children[module.__dict__[GROUP][0]]
    joined = held(x.to(held.scale.device) if first.follows else x)
    return joined, tuple(children[name].out_features for name in module.__dict__[GROUP])


def specifications(model: nn.Module) -> Iterator[tuple[str, QuantizedSpec]]:
    """(which layers, specification) of every 8-bit product that the model makes as it is now."""
    joined: set[int] = set()
    for module in model.modules():
        held = group_of(module)
        if held is not None:
            joined.add(id(held))
            children: Any = module._modules
            names = module.__dict__[GROUP]
            yield _specification(" + ".join(names), children[names[0]], held, len(held.scale))
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear) and id(module.quantized) not in joined:
            yield _specification(path.rpartition(".")[2], module, module.quantized, module.out_features)


def _specification(name: str, layer: QuantizedLinear, held: QuantizedWeight, n: int) -> tuple[str, QuantizedSpec]:
    bias = None if held.bias is None else held.bias.dtype
    spec = QuantizedSpec(layer.dtype, held.data.dtype, held.scale.device, n, layer.in_features, bias, held.shuffled)
    return f"{name}, {n} × {layer.in_features}", spec
