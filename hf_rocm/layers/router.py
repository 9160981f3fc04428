"""Routers of experts: a small GEMM, then one kernel that selects the experts; stock launches about ten kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, compiler, nn

from hf_rocm import ops, options
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.linear import left_to_pytorch
from hf_rocm.ops.routing import one_kernel
from hf_rocm.ops.routing_torch import CHOSEN, SIGMOID, SOFTMAX
from hf_rocm.options import Switch


@dataclass(frozen=True)
class TopKRouter:
    """A router with a `weight` [E, H] and an optional `bias`. Returns (logits [T, E], weights [T, k], ids [T, k]).

    chosen_only: the weights are a softmax of the chosen logits, as in gpt-oss, not the chosen values of a softmax.
    normalise: whether the weights are divided by their sum, or the name of the attribute with this flag. wide: whether
    the weights are returned in fp32, not in the dtype of the logits.
    """

    chosen_only: bool = False
    normalise: bool | str = False
    wide: bool = False

    def forward(self, module: Any, stock: Callable[..., Any], x: Tensor) -> Any:
        """x: [T, H]. Runs the stock forward unless a kernel chooses the experts after a plain GEMM."""
        weight, bias, terms = module._parameters["weight"], module._parameters.get("bias"), self.terms(module)
        if x.ndim != 2 or not _is_plain_gemm(x, weight, bias) or not one_kernel(x, experts=len(weight), **terms):
            return stock(module, x)
        logits = ops.linear(x, weight, bias)
        return logits, *ops.choose_experts(logits, **terms)

    def terms(self, module: Any) -> dict[str, Any]:
        """Return the arguments of `ops.choose_experts` for a module."""
        normalise = self.normalise if isinstance(self.normalise, bool) else getattr(module, self.normalise)
        return {
            "top": module.top_k,
            "scores": CHOSEN if self.chosen_only else SOFTMAX,
            "normalise": normalise,
            "dtype": torch.float32 if self.wide else None,
        }


@dataclass(frozen=True)
class GroupedRouter:
    """DeepSeek's router: sigmoid scores, groups, scaled weights, and a bias that affects only which experts are chosen.

    It has a `weight` [E, H], multiplied in fp32, and returns what `TopKRouter` returns.
    """

    def forward(self, module: Any, stock: Callable[..., Any], x: Tensor) -> Any:
        """x: [..., H]. Runs the stock forward unless a kernel chooses the experts after a plain GEMM."""
        weight, terms = module._parameters["weight"], self.terms(module)
        if not _is_plain_gemm(x, weight, None) or not one_kernel(x, experts=len(weight), wide=True, **terms):
            return stock(module, x)
        logits = nn.functional.linear(x.flatten(0, -2).to(torch.float32), weight.to(torch.float32))
        return logits, *ops.choose_experts(logits, **terms, epsilon=1e-20, scale=float(module.routed_scaling_factor))

    def terms(self, module: Any) -> dict[str, Any]:
        """Return those arguments of `ops.choose_experts` that determine which implementation serves a module."""
        return {
            "top": module.top_k,
            "scores": SIGMOID,
            "bias": module._buffers["e_score_correction_bias"],
            "groups": module.num_group,
            "chosen_groups": module.topk_group,
            "normalise": module.norm_topk_prob,
            "dtype": torch.float32,
        }


def _is_plain_gemm(x: Tensor, weight: Any, bias: Any) -> bool:
    """Return whether a router computes a plain GEMM of plain parameters, without gradients and outside a trace.

    False if aiter is required for linear layers.
    """
    if compiling() or compiler._is_compiling_flag or left_to_pytorch(x):
        return False
    current = options.current()
    if current.aiter["linear"] is Switch.REQUIRED or current.tier("linear") == "aiter":
        # If aiter is required, it serves large GEMMs, and other GEMMs raise an error.
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    return all(
        parameter is None or (type(parameter) is nn.Parameter and parameter.dtype == x.dtype and not parameter.is_meta)
        for parameter in (weight, bias)
    )
