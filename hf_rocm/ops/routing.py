"""choose_experts: choose the experts of every token, and their weights, from a router's logits.

A router is a small GEMM followed by about ten small operations: softmax or sigmoid, a bias, a restriction to groups
of experts, top-k, and a division by the sum. In a decode step each of them is a separate launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, compiler

from hf_rocm import options
from hf_rocm.errors import OptionError
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.probe_cases import LENGTH, Draw
from hf_rocm.ops.registry import Case, Implementation, Operation, kernel_serves, refuses_nothing
from hf_rocm.ops.routing_torch import SCORES, SOFTMAX, eager, stock
from hf_rocm.ops.specs.experts import RoutingCall, RoutingSpec
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton import routing as triton
from hf_rocm.options import Switch


def choose_experts(
    logits: Tensor,
    *,
    top: int,
    scores: str = SOFTMAX,
    bias: Tensor | None = None,
    groups: int = 1,
    chosen_groups: int = 1,
    best: int = 2,
    normalise: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The `top` experts with the largest scores of every token, and their weights.

    logits: [T, E] floating-point. scores: with `softmax` or `sigmoid`, this function of all logits, computed in at
    least fp32, provides both scores and weights; with `softmax of the chosen`, the logits are the scores, and the
    weights are a softmax of the chosen logits. bias: [E], added to the scores, not to the weights. groups: the number
    of groups of consecutive experts. Only experts in the `chosen_groups` best groups are eligible. Groups are ranked by
    the sum of their `best` largest scores. normalise: divide the weights by their sum plus epsilon. scale: multiplies
    the weights. dtype: the dtype of the weights, by default that of the logits.
    Among experts with equal scores, the one with the lower index is chosen, as by `torch.topk` on a GPU. On a CPU, the
    torch tier chooses as `torch.topk` does there. Returns (weights [T, top], ids [T, top] int64), in
    descending order of the scores with the bias. Raises `OptionError` for any other `scores`.
    """
    if scores not in SCORES:
        raise OptionError(f"choose_experts does not support scores={scores!r}", facts={"known": ", ".join(SCORES)})
    weight_dtype = logits.dtype if dtype is None else dtype
    call = RoutingCall(logits, bias, top, scores, groups, chosen_groups, best, normalise, epsilon, scale, weight_dtype)
    spec = specification(call, experts=logits.shape[1])
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: tuple[Tensor, Tensor] = serve(call)
    return result


def one_kernel(x: Tensor, *, experts: int, wide: bool = False, **terms: Any) -> bool:
    """Whether one kernel computes `choose_experts` for logits of x's dtype, or in fp32 if `wide`, on x's device.

    terms: arguments of `choose_experts`.
    """
    if options.current().aiter["experts"] is Switch.REQUIRED:
        return False
    return kernel_serves(_operation, specification_for(x, experts=experts, wide=wide, **terms))


def specification_for(
    x: Tensor,
    *,
    experts: int,
    wide: bool,
    top: int,
    scores: str = SOFTMAX,
    bias: Tensor | None = None,
    groups: int = 1,
    chosen_groups: int = 1,
    best: int = 2,
    normalise: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[object, ...]:
    """`specification` for logits that don't exist yet. x: a tensor with their device, and their dtype unless `wide`."""
    weight_dtype = x.dtype if dtype is None else dtype
    call = RoutingCall(x, bias, top, scores, groups, chosen_groups, best, normalise, 0.0, 1.0, weight_dtype)
    return specification(call, experts=experts, wide=wide)


def specification(call: RoutingCall, *, experts: int, wide: bool = False) -> tuple[object, ...]:
    """The fields of a `RoutingSpec`, as a plain tuple with which the implementation is selected.

    wide: the logits will be in fp32.
    """
    logits, bias, top_k, scores, groups, chosen_groups, best, normalise, _, _, weight_dtype = call
    grad = torch.is_grad_enabled() and (logits.requires_grad or (bias is not None and bias.requires_grad))
    dtype, device, biased = torch.float32 if wide else logits.dtype, logits.device, bias is not None
    return (
        dtype,
        weight_dtype,
        device,
        experts,
        top_k,
        scores,
        biased,
        groups,
        chosen_groups,
        best,
        normalise,
        grad,
    )


def _cases(spec: RoutingSpec) -> Iterator[Case]:
    """Logits on a coarse grid, so that rounding changes no choice. Every token has ties."""
    draw = Draw(torch.float32, spec.device)
    for tokens in (1, LENGTH):
        order = draw(tokens, spec.experts).argsort(-1)
        steps = 16.0 / spec.experts
        logits = ((order // 2) * steps - 8.0).to(spec.dtype)
        bias = None
        if spec.biased:
            bias = (torch.arange(spec.experts, device=spec.device) % 3).to(torch.float32) * 0.25
        further = (spec.groups, spec.chosen_groups, spec.best, spec.normalise, 1e-20, 2.5, spec.weight_dtype)
        yield Case((logits, bias), (spec.top_k, spec.scores, *further))


_operation = Operation("choose_experts", RoutingSpec, _cases, family="experts", terms=RoutingCall, recorded=(0,))
_operation.register(
    Implementation(
        "triton", triton.NAME, triton.refuses, triton.choose_experts, detect.checked("choose_experts", triton.NAME)
    )
)
_operation.register(Implementation("torch", "softmax, topk", refuses_nothing, stock))
_operation.register(Implementation("eager", "softmax, stable sort", refuses_nothing, eager))
