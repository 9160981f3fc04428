"""Linear layers of a quantised checkpoint: as loaded by transformers, and with an encoded weight for hf_rocm's kernels.

`StoredLinear` has the checkpoint's own tensors, so loading only copies bytes. `hf_rocm.prepare` replaces it with an
`EncodedLinear`, whose state dict contains the same tensors, and `hf_rocm.restore` undoes the replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import Linear

from hf_rocm.weights.encoding import QuantizedWeight, moved
from hf_rocm.weights.quantized import QuantizedLinear
from hf_rocm.weights.stored import SCALES, LinearFormat, StoredFormat, TensorInfo


class StoredLayer(nn.Module):
    """Replaces a layer when a quantised checkpoint is loaded. Its buffers are the checkpoint's tensors."""

    def __init__(
        self, module: nn.Module, format: StoredFormat, infos: Mapping[str, TensorInfo], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.training = module.training
        self.format, self.infos, self.dtype = format, dict(infos), dtype
        for name, (stored_dtype, shape) in infos.items():
            if self.is_plain(name):
                self.register_buffer(name, torch.empty(shape, dtype=stored_dtype, device="meta"))

    @staticmethod
    def is_plain(name: str) -> bool:
        """Whether transformers can load a tensor with this name. A name with a dot would refer to a child module."""
        return "." not in name

    def attach(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that transformers could not load."""
        device = next(tensor for tensor in self._buffers.values() if tensor is not None).device
        self.register_buffer(_attribute(name), tensor.to(device))

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Whether the module is an instance of the class that this one replaces."""
        raise NotImplementedError

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        """The reason why this class can't replace the module, as a sentence without its subject, or None."""
        raise NotImplementedError

    @classmethod
    def sizes(cls, module: Any) -> tuple[int, ...]:
        """The sizes of a module, which are arguments of `StoredFormat.expected`."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint's tensors by name."""
        buffers: Any = self._buffers
        return {name: buffers[_attribute(name)] for name in self.infos if _attribute(name) in buffers}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.infos:
            if not self.is_plain(name) and prefix + _attribute(name) in destination:
                destination[prefix + name] = destination.pop(prefix + _attribute(name))

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        names = {prefix + name: prefix + _attribute(name) for name in self.infos}
        given = {names.get(name, name): state_dict[name] for name in state_dict}
        error_msgs: list[str] = rest[-1]
        for name in self.infos:
            value = state_dict.get(prefix + name)
            dtype = self.stored_dtype(name)
            if value is not None and dtype not in (None, value.dtype):
                error_msgs.append(f"dtype mismatch for {prefix}{name}: {value.dtype} given, {dtype} expected")
                del given[names[prefix + name]]
        super()._load_from_state_dict(given, prefix, *rest)

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor with encoded numbers, or None for scales and other tensors, which are cast."""
        dtype = self.infos[name].dtype if name in self.infos and name in self.format.bulk else None
        return None if dtype in SCALES else dtype

    def ordinary(self) -> nn.Module:
        """Return the ordinary layer with the dequantised weight in the layer's dtype."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredLayer:
        """`.to()` and similar methods move the checkpoint's tensors, but never change their dtypes."""
        parameters = {id(parameter) for parameter in self._parameters.values()}
        super()._apply(lambda tensor: fn(tensor) if id(tensor) in parameters else moved(tensor, fn), recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self


class StoredLinear(StoredLayer):
    """Replaces an `nn.Linear`.

    Every call dequantises the weight, which is slow. This happens in models that are not prepared, and in layers that
    can't be encoded. biased: whether the checkpoint has a bias for this layer, even if the model's own layer
    has none.
    """

    format: LinearFormat

    def __init__(self, linear: Linear, format: LinearFormat, infos: Mapping[str, TensorInfo], *, biased: bool) -> None:
        super().__init__(linear, format, infos, linear.weight.dtype)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # some libraries store a bias for every layer
        added = nn.Parameter(linear.weight.new_empty(self.out_features)) if biased and linear.bias is None else None
        self.bias = linear.bias if added is None else added

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        return isinstance(module, Linear)

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        return None if type(module) is Linear else f"is of type {type(module).__qualname__}, not a plain nn.Linear"

    @classmethod
    def sizes(cls, module: Any) -> tuple[int, ...]:
        return module.out_features, module.in_features

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.dequantized(x.dtype), bias)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] in this dtype, as a new tensor."""
        with torch.no_grad():
            return self.format.read(self.tensors(), self.out_features, self.in_features, dtype)

    def ordinary(self) -> Linear:
        return as_linear(self.dequantized(self.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.format.described()}"


class EncodedLinear(QuantizedLinear):
    """Replaces a `StoredLinear`. Its weight is a range of rows of a `QuantizedWeight` with the checkpoint's numbers.

    State dicts contain the checkpoint's tensors, on the CPU; the large ones are recreated byte for byte. Loading any of
    these tensors updates the encoded weight.
    """

    def __init__(self, stored: StoredLinear, quantized: QuantizedWeight, start: int) -> None:
        super().__init__(stored, quantized, start, warns=False)
        for tensor in (tensor for name, tensor in stored.tensors().items() if name in stored.format.bulk):
            with torch.inference_mode(tensor.is_inference()):
                # Use a dtype that can be pickled.
                tensor.data = torch.empty(0, dtype=torch.int8)
        if stored.bias is not None:
            with torch.inference_mode(stored.bias.is_inference()):
                stored.bias.data = stored.bias.data.new_empty(0)

    @property
    def stored(self) -> StoredLinear:
        """The layer that this one replaced, without its large tensors."""
        stored: StoredLinear = self.replaced[0]
        return stored

    @property
    def kept(self) -> bool:
        """True, because the checkpoint's bytes can always be recreated."""
        return True

    def _recreated(self, name: str) -> Tensor:
        format, info = self.stored.format, self.stored.infos[name]
        with torch.no_grad():
            return format.get(self.quantized, self.start, self.out_features, name, info)

    def original(self) -> nn.Module:
        """Return the layer that this one replaced, with its own tensors, on the device of the encoded weight."""
        stored, device = self.stored, self.quantized.scale.device
        for name, tensor in stored.tensors().items():
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = self._recreated(name) if name in stored.format.bulk else tensor.data.to(device)
        if stored.bias is not None and self.bias is not None:
            with torch.inference_mode(stored.bias.is_inference()):
                stored.bias.data = self.bias.clone()
        stored.dtype = self.dtype
        return stored

    def ordinary(self) -> nn.Module:
        return as_linear(self.weight, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        stored = self.stored
        for name, tensor in stored.tensors().items():
            value = self._recreated(name) if name in stored.format.bulk else tensor.detach()
            destination[prefix + name] = value.cpu()
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias.cpu().clone()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: info.shape for name, info in self.stored.infos.items()}
        return shapes if self.bias is None else {**shapes, "bias": (self.out_features,)}

    def _dtype(self, name: str) -> torch.dtype | None:
        return self.stored.stored_dtype(name)

    @torch.no_grad()
    def _take(self, values: Mapping[str, Tensor]) -> None:
        stored = self.stored
        bulk = stored.format.bulk
        if not values.keys().isdisjoint(stored.infos):
            given = {
                name: self._recreated(name) if name in bulk else tensor for name, tensor in stored.tensors().items()
            }
            given |= {name: value for name, value in values.items() if name in given}
            stored.format.put(self.quantized, self.start, given)
            for name, value in given.items():
                if name not in bulk:
                    stored.tensors()[name].data.copy_(value)
        if "bias" in values and self.bias is not None:
            self.bias.copy_(values["bias"])


def as_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return an `nn.Linear` with this weight and a copy of this bias."""
    n, k = weight.shape
    linear = Linear(k, n, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return linear


def _attribute(name: str) -> str:
    return name.replace(".", "_")
