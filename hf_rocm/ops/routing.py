"""choose_experts: from a router's logits to the experts of every token and their weights.

A router is a small product followed by some ten small operations: softmax or sigmoid, a bias, a limit to groups of
experts, top-k, a division by the sum. In a decode step each of them is a separate launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, compiler

from hf_rocm import options
from hf_rocm.errors import OptionError
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.probe_cases import LENGTH, Draw
from hf_rocm.ops.registry import Case, Implementation, Operation, kernel_serves, refuses_nothing
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton import routing as triton
from hf_rocm.options import Switch

SOFTMAX, SIGMOID, CHOSEN = "softmax", "sigmoid", "softmax of the chosen"
SCORES = (SOFTMAX, SIGMOID, CHOSEN)


class RoutingSpec(NamedTuple):
    """The specification of a call, from which an implementation is selected.
    experts: E; top: k; weight_dtype: of the result.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    experts: int
    top: int
    scores: str
    biased: bool
    groups: int
    chosen_groups: int
    best: int
    normalise: bool
    grad: bool


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

    logits: [T, E] floating. scores: `softmax` and `sigmoid` of all logits, in at least fp32, are both the scores and
    the weights; with `softmax of the chosen` the logits are the scores, and a softmax of the chosen ones the weights.
    bias: [E], added to the scores, not to the weights. groups: E is divided into as many groups of neighbours; only the
    experts of the `chosen_groups` groups are eligible whose `best` largest scores have the largest sum. normalise:
    divide the weights by their sum plus epsilon. scale: multiplies the weights. dtype: of the weights, default that of
    the logits.
    Of equal scores, that of the lower expert is the larger one, as with `torch.topk` on a GPU; on a CPU, the torch tier
    chooses as `torch.topk` there. Returns (weights [T, top], ids [T, top] int64), the largest score first; with groups
    or a bias, the torch tier's order is not defined. Raises `OptionError` on other scores.
    """
    if scores not in SCORES:
        raise OptionError(f"choose_experts has no scores {scores!r}", facts={"known": ", ".join(SCORES)})
    weight_dtype = logits.dtype if dtype is None else dtype
    spec = specification(
        logits, bias, weight_dtype, logits.shape[1], top, scores, groups, chosen_groups, best, normalise
    )
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: tuple[Tensor, Tensor] = serve(
        logits, bias, top, scores, groups, chosen_groups, best, normalise, epsilon, scale, weight_dtype
    )
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
    """`specification` of logits that don't exist yet. x: a tensor of their device, and of their dtype unless `wide`."""
    weight_dtype = x.dtype if dtype is None else dtype
    return specification(x, bias, weight_dtype, experts, top, scores, groups, chosen_groups, best, normalise, wide=wide)


def specification(
    logits: Tensor,
    bias: Tensor | None,
    weight_dtype: torch.dtype,
    experts: int,
    top: int,
    scores: str,
    groups: int,
    chosen_groups: int,
    best: int,
    normalise: bool,
    *,
    wide: bool = False,
) -> tuple[object, ...]:
    """The fields of a `RoutingSpec`, as a plain tuple for the router."""
    grad = torch.is_grad_enabled() and (logits.requires_grad or (bias is not None and bias.requires_grad))
    dtype, device, biased = torch.float32 if wide else logits.dtype, logits.device, bias is not None
    return (
        dtype,
        weight_dtype,
        device,
        experts,
        top,
        scores,
        biased,
        groups,
        chosen_groups,
        best,
        normalise,
        grad,
    )


def _torch(
    logits: Tensor,
    bias: Tensor | None,
    top: int,
    scores: str,
    groups: int,
    chosen_groups: int,
    best: int,
    normalise: bool,
    epsilon: float,
    scale: float,
    dtype: torch.dtype,
    *,
    stable: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operations of the stock routers. stable: choose by a stable sort instead of `torch.topk`."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    if scores == SOFTMAX:
        values = logits.softmax(-1, dtype=wide)
    elif scores == SIGMOID:
        values = logits.to(wide).sigmoid()
    else:
        values = logits
    choice = values if bias is None else values + bias
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        sums = _largest(grouped, best, stable)[0].sum(-1)
        kept = torch.zeros_like(sums).scatter(-1, _largest(sums, chosen_groups, stable)[1], 1.0)
        choice = grouped.masked_fill(kept.unsqueeze(-1) == 0, -torch.inf).flatten(-2)
    ids = _largest(choice, top, stable)[1]
    weights = values.gather(-1, ids)
    if scores == CHOSEN:
        weights = weights.to(wide).softmax(-1)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
    if scale != 1.0:
        weights = weights * scale
    return weights.to(dtype), ids


def _eager(*arguments: object) -> tuple[Tensor, Tensor]:
    """The oracle: the same, with the lower of two experts with equal scores."""
    return _torch(*arguments, stable=True)  # type: ignore[arg-type]


def _largest(values: Tensor, count: int, stable: bool) -> tuple[Tensor, Tensor]:
    if not stable:
        largest = values.topk(count, dim=-1)
        return largest.values, largest.indices
    ordered, places = values.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :count], places[..., :count]


def _cases(spec: RoutingSpec) -> Iterator[Case]:
    """Logits in steps that every dtype has, so that no rounding decides. Two of a token's are always equal."""
    draw = Draw(torch.float32, spec.device)
    for tokens in (1, LENGTH):
        order = draw(tokens, spec.experts).argsort(-1)
        steps = 16.0 / spec.experts
        logits = ((order // 2) * steps - 8.0).to(spec.dtype)
        bias = None
        if spec.biased:
            bias = (torch.arange(spec.experts, device=spec.device) % 3).to(torch.float32) * 0.25
        further = (spec.groups, spec.chosen_groups, spec.best, spec.normalise, 1e-20, 2.5, spec.weight_dtype)
        yield Case((logits, bias), (spec.top, spec.scores, *further))


_operation = Operation("choose_experts", RoutingSpec, _cases, family="experts", recorded=(0,))
_operation.register(
    Implementation(
        "triton", triton.NAME, triton.refuses, triton.choose_experts, detect.checked("choose_experts", triton.NAME)
    )
)
_operation.register(Implementation("torch", "softmax, topk", refuses_nothing, _torch))
_operation.register(Implementation("eager", "softmax, stable sort", refuses_nothing, _eager))
