"""The encoded weight of quantised layers, and the encodings by name.

An encoding is a subclass of `QuantizedWeight`. Every encoding has its own file, which registers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_rocm import ops
from hf_rocm.ops.quantized import keeps_input

EncodingT = TypeVar("EncodingT", bound="QuantizedWeight")

# The number of elements that are rounded at once; 16 MiB in fp32.
CHUNK = 2**22


class QuantizedWeight(nn.Module):
    """A linear layer's weight in an encoding with scales.

    data: [N, …], the encoded numbers; scale: one or several per `per_scale` rows; bias: [N] or None; zeros: the same
    shape as scale, or None; order: [K], the index of the input for every encoded column, or None.

    The buffers are not part of a state dict, because the layers save the weights in their original form. A subclass
    defines an encoding. format: the parameters of the encoding apart from the sizes, as returned by `format_for`.
    """

    data: Tensor
    scale: Tensor
    bias: Tensor | None
    zeros: Tensor | None
    order: Tensor | None
    # Rows are encoded in multiples of this number.
    step = 1
    # The number of rows that share their scales.
    per_scale = 1
    # The name of the table of 4-bit numbers.
    code: str | None = None
    # The class that replaces stacked experts; None if they keep their dtype.
    experts: type[Any] | None = None
    # Whether x is rounded too, except in calls for which `keeps_input` returns True.
    rounds = False

    def __init__(self, data: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("data", data, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.register_buffer("zeros", None, persistent=False)
        self.register_buffer("order", None, persistent=False)
        self.shuffled = False

    @classmethod
    def format_for(cls, model: nn.Module, kind: str) -> Any:
        """Return the format for a model's weights. kind: one of the names under which the encoding is registered."""
        raise NotImplementedError

    @classmethod
    def described(cls, format: Any) -> str:
        """Return the format as text for a report."""
        raise NotImplementedError

    @classmethod
    def refuses(cls, weight: Tensor, format: Any) -> str | None:
        """Return the reason why a layer with this weight is not quantised, or None."""
        return None

    @classmethod
    def empty(cls, n: int, weight: Tensor, format: Any, bias: Tensor | None) -> QuantizedWeight:
        """Return an uninitialised weight with n rows and the K of `weight`, on the same device."""
        raise NotImplementedError

    def read(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return these rows, dequantised, as a new tensor [stop - start, K]."""
        raise NotImplementedError

    def written(self, dtype: torch.dtype) -> None:
        """Called after all rows have been written. dtype: the dtype of the inputs."""

    def _encode(self, place: slice, part: Tensor) -> None:
        """Encode some rows, [rows, K], on the device of this weight."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        start: int = 0,
        stop: int | None = None,
        *,
        norm: ops.Norm | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the outputs [..., stop - start] of the rows from start to stop. x: [..., K].

        norm, activation, residual, kwargs: as in `ops.quantized_linear`.
        """
        # This is faster than attribute access on a module.
        buffers: Any = self._buffers
        data, scale, bias, zeros = buffers["data"], buffers["scale"], buffers["bias"], buffers["zeros"]
        if start or stop is not None:
            data, scale = data[start:stop], scale[self.scales_of(start, stop)]
            zeros = None if zeros is None else zeros[start:stop]
            bias = None if bias is None else bias[start:stop]
        # Under autocast, F.linear converts its inputs too.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return ops.quantized_linear(
            x,
            data,
            scale,
            bias,
            shuffled=self.shuffled,
            round_input=self.rounds and not keeps_input(x, data, scale, bias, self.shuffled),
            norm=norm,
            activation=activation,
            residual=residual,
            zeros=zeros,
            order=buffers["order"],
            **kwargs,
        )

    def scales_of(self, start: int, stop: int | None) -> slice:
        """Return the rows of `scale` for the weight's rows from start to stop. start: a multiple of `per_scale`."""
        per = self.per_scale
        return slice(start // per, None if stop is None else -(-stop // per))

    def write(self, start: int, weight: Tensor) -> None:
        """Quantise a weight [N_i, K] into the rows that begin at `start`, in chunks."""
        step = max(self.step, CHUNK // weight.shape[1] // self.step * self.step)
        for first in range(0, len(weight), step):
            part = weight[first : first + step].to(self.scale.device)
            self._encode(slice(start + first, start + first + len(part)), part)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedWeight:
        """`.to()` and similar methods move the encoded numbers and scales, but never change their dtypes."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer) if name == "bias" else moved(buffer, fn)
        return self


def moved(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return fn(tensor), as in `nn.Module._apply`, or only move the tensor to the same device if fn would cast it."""
    sample = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    if tensor.is_meta:
        return torch.empty_like(tensor, device=sample.device)
    return fn(tensor) if sample.dtype == tensor.dtype else tensor.to(sample.device)


_encodings: dict[str, type[QuantizedWeight]] = {}


def encoding(*names: str) -> Callable[[type[EncodingT]], type[EncodingT]]:
    """Register an encoding under the names of its kinds."""

    def register(cls: type[EncodingT]) -> type[EncodingT]:
        _encodings.update(dict.fromkeys(names, cls))
        return cls

    return register


def encodings() -> dict[str, type[QuantizedWeight]]:
    """Return the imported encodings by the names of their kinds."""
    return dict(_encodings)
