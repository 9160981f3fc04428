"""RMSNorm modules: Llama's, and Gemma's (1 + w)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm import ops

_PLAIN = (nn.Parameter, torch.Tensor)


def rms_norm(module: Any, stock: Callable[..., Any], x: Tensor, *, eps: float, one_plus: bool = False) -> Tensor:
    """The norm of a module with a `weight` [D]; x: [..., D]. Returns [..., D] as the stock forward would.

    Stays stock where stock's own dtype rules would show: a plain norm whose weight has another dtype than x is
    promoted there, and a weight that isn't a plain tensor (a DTensor) brings operations of its own.
    """
    weight = module.weight
    if type(weight) not in _PLAIN or (not one_plus and weight.dtype != x.dtype):
        result: Tensor = stock(module, x)
        return result
    return ops.rms_norm(x, weight, eps=eps, one_plus=one_plus)
