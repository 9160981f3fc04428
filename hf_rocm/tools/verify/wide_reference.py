"""The reference: the same stock model in a wider dtype, with one block's weights widened at a time.

Weights are widened only while their block is called, so that memory never contains a second model. Operations that
stock runs in a narrower dtype, such as a norm in fp32 or a softmax, run in the wide dtype too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_rocm.tools.verify.intercept import Interceptor, hidden_of, intercepted, with_hidden

_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the reference: fp32 for a 16-bit model, fp64 for an fp32 model."""
    return torch.float64 if torch.finfo(dtype).bits > 16 else torch.float32


@contextmanager
def widened(model: nn.Module, blocks: dict[str, nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Make the model compute in `dtype` within the `with` statement.

    All weights of a block in `blocks` are widened while that block is called.
    """
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    interceptors: dict[int, Interceptor] = {}
    for module in model.modules():
        if id(module) not in inside and module._parameters:
            interceptors[id(module)] = _interceptor([module], dtype)
    for block in blocks.values():
        interceptors[id(block)] = _interceptor(list(block.modules()), dtype)
    with intercepted(interceptors), computing_in(dtype):
        yield


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights of a model to another dtype, in place.

    Buffers of modules without weights, such as `inv_freq` of rotary embeddings, have their own precision and are not
    converted.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items() if module._parameters else ():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Within the `with` statement, prevent operations from narrowing tensors of this dtype.

    The matmul precision is set to the highest one.
    """
    default, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    if dtype == torch.float64:
        # Masks have the default dtype, and fp64's smallest value overflows fp32.
        torch.set_default_dtype(dtype)
    try:
        with _Wide(dtype):
            yield
    finally:
        torch.set_default_dtype(default)
        torch.set_float32_matmul_precision(precision)


def _interceptor(modules: list[nn.Module], dtype: torch.dtype) -> Interceptor:
    def intercept(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        hidden = hidden_of(args, kwargs)
        if hidden is not None and hidden.is_floating_point():
            args, kwargs = with_hidden(args, kwargs, hidden.to(dtype))
        originals = [_widen(inner, dtype) for inner in modules]
        try:
            return call(*args, **kwargs)
        finally:
            for inner, (parameters, buffers) in zip(modules, originals, strict=True):
                inner._parameters.update(parameters)
                inner._buffers.update(buffers)

    return intercept


def _widen(module: nn.Module, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace narrower parameters and buffers of a module with wide copies. Returns the originals."""
    parameters = {name: tensor for name, tensor in module._parameters.items() if _narrow(tensor, dtype)}
    # buffers of modules without parameters, such as `inv_freq` of rotary embeddings, have their own precision
    buffers = {name: tensor for name, tensor in module._buffers.items() if parameters and _narrow(tensor, dtype)}
    for name in parameters:
        module._parameters[name] = nn.Parameter(_tensor(parameters[name]).to(dtype), requires_grad=False)
    for name in buffers:
        module._buffers[name] = _tensor(buffers[name]).to(dtype)
    return parameters, buffers


def _tensor(value: Tensor | None) -> Tensor:
    assert value is not None
    return value.detach()


def _narrow(tensor: Tensor | None, dtype: torch.dtype) -> bool:
    return tensor is not None and tensor.is_floating_point() and tensor.dtype != dtype


class _Wide(TorchFunctionMode):
    """Skip conversions that would narrow a wide tensor, and convert attention masks to the query's dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return func(*args, **self._with_mask_like(args[0] if args else kwargs["query"], kwargs))
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or first.dtype != self.dtype:
            return func(*args, **kwargs)
        if name in _CASTS:
            return first
        if name in ("to", "type", "softmax", "log_softmax"):
            args = (first, *(self._wider(argument) for argument in args[1:]))
            kwargs = {key: self._wider(argument) for key, argument in kwargs.items()}
        elif name == "type_as":
            return first
        return func(*args, **kwargs)

    def _wider(self, value: Any) -> Any:
        """Replace a floating-point dtype with the wide dtype.

        A tensor, which is passed for its dtype, is replaced with an empty tensor of the wide dtype.
        """
        if isinstance(value, torch.dtype):
            return self.dtype if value.is_floating_point else value
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.new_empty(0, dtype=self.dtype)
        return value

    def _with_mask_like(self, query: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        mask = kwargs.get("attn_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            return {**kwargs, "attn_mask": mask.to(query.dtype)}
        return kwargs
