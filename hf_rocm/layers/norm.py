"""RMSNorm modules: Llama's, and Gemma's (1 + w)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_rocm import ops
from hf_rocm.layers.branch import TERMS

_PLAIN = (nn.Parameter, torch.Tensor)


def rms_norm(module: Any, stock: Callable[..., Any], x: Any, *, eps: float, one_plus: bool = False) -> Any:
    """The norm of a module with a `weight` [D]; x: [..., D]. Returns [..., D] as the stock forward would.

    Where x is `TERMS`, a decoder layer asks for the norm's terms, which are returned, or None if there are others.

    Stays stock where stock's own dtype rules would show: a plain norm whose weight has another dtype than x is
    promoted there, and a weight that isn't a plain tensor (a DTensor) brings operations of its own.
    """
    weight = module.weight
    if x is TERMS:
        return ops.Norm(weight, eps, one_plus) if type(weight) in _PLAIN else None
    if type(weight) not in _PLAIN or (not one_plus and weight.dtype != x.dtype):
        return stock(module, x)
    return ops.rms_norm(x, weight, eps=eps, one_plus=one_plus)
