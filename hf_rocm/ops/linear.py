"""linear: x Wᵀ + b.

The vendor library behind `F.linear` is the torch tier; aiter's tuned GEMMs come before it where they fit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm.device import Device
from hf_rocm.ops.aiter import linear as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.registry import Implementation, Operation, route


class LinearSpec(NamedTuple):
    """What the choice of a linear implementation depends on. k, n: a GEMM of [M, K] by [N, K]ᵀ."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    n: int
    k: int
    bias_dtype: torch.dtype | None
    contiguous: bool  # the weight
    grad: bool


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b.

    x: [..., K]; weight: [N, K]; bias: [N] or None; one dtype. Returns [..., N].
    """
    grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    n, k = weight.shape
    bias_dtype = None if bias is None else bias.dtype
    key = (x.dtype, weight.dtype, x.device, n, k, bias_dtype, weight.is_contiguous(), grad)
    result: Tensor = route(_operation, key, x, weight)(x, weight, bias)
    return result


def eager_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The oracle: one matrix product and one sum."""
    product = torch.matmul(x, weight.t())
    return product if bias is None else product + bias


def _refuses_nothing(spec: LinearSpec, device: Device) -> str | None:
    return None


_operation = Operation("linear", LinearSpec)
_operation.register(
    Implementation("aiter", "gemm_a16w16", aiter.refuses, aiter.linear, checked("linear", "gemm_a16w16"))
)
_operation.register(Implementation("torch", "F.linear", _refuses_nothing, F.linear))
_operation.register(Implementation("eager", "matmul", _refuses_nothing, eager_linear))
