"""The experts of a token: scores, groups, top-k and weights in one launch, in registers.

A score and its expert are packed into one integer. These integers are ordered by score and, among equal scores, by
descending expert. So one max reduction returns a score and its expert, and no expert is selected twice, whatever the
scores are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_rocm.ops.triton.builds import Build
from hf_rocm.ops.triton.kernels.packed import LEAST, index_of, number_of, pack


@triton.jit
def routing_kernel(
    logits,  # [T, E]
    bias,  # [E] or None
    weights,  # [T, k]
    ids,  # [T, k]
    epsilon,
    scale,
    EXPERTS: tl.constexpr,  # E
    TOP_K: tl.constexpr,  # k
    SCORES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    logits += token * EXPERTS
    expert = tl.arange(0, BLOCK)
    valid = expert < EXPERTS
    values = tl.load(logits + expert, mask=valid, other=-float("inf")).to(tl.float32)
    highest = tl.max(values, 0)
    total = 1.0
    if SCORES == "softmax":
        total = tl.sum(tl.exp(values - highest), 0)
    choice = _score(values, highest, total, SCORES)
    if bias is not None:
        choice += tl.load(bias + expert, mask=valid, other=0.0).to(tl.float32)
    packed = tl.where(valid, pack(choice, expert, BLOCK), LEAST)
    if GROUPS > 1:
        packed = _of_best_groups(packed, GROUPS, CHOSEN_GROUPS, BEST, BLOCK)
    place = tl.arange(0, BLOCK_TOP_K)
    chosen = tl.zeros([BLOCK_TOP_K], tl.int32)
    for index in tl.static_range(TOP_K):
        largest = tl.max(packed, 0)
        packed = tl.where(packed == largest, LEAST, packed)
        chosen = tl.where(place == index, index_of(largest, BLOCK), chosen)
    real = place < TOP_K
    chosen_logits = tl.load(logits + chosen, mask=real, other=-float("inf")).to(tl.float32)
    if SCORES == "softmax of the chosen":
        chosen_logits = tl.exp(chosen_logits - tl.max(chosen_logits, 0))
        weight = chosen_logits / tl.sum(chosen_logits, 0)
    else:
        weight = tl.where(real, _score(chosen_logits, highest, total, SCORES), 0.0)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + epsilon)
    weight = weight * scale
    at = token * TOP_K + place
    tl.store(weights + at, weight.to(weights.dtype.element_ty), mask=real)
    tl.store(ids + at, chosen.to(tl.int64), mask=real)


@triton.jit
def _score(values, highest, total, SCORES: tl.constexpr):
    if SCORES == "softmax":
        values = tl.exp(values - highest) / total
    elif SCORES == "sigmoid":
        values = 1.0 / (1.0 + tl.exp(-values))
    return values


@triton.jit
def _of_best_groups(packed, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BEST: tl.constexpr, BLOCK: tl.constexpr):
    """Keep the packed scores of the groups whose best scores have the largest sums."""
    grouped = tl.reshape(packed, (GROUPS, BLOCK // GROUPS))
    first = tl.max(grouped, 1)
    sums = number_of(first)
    if BEST == 2:
        sums += number_of(tl.max(tl.where(grouped == first[:, None], LEAST, grouped), 1))
    group = tl.arange(0, GROUPS)
    ranked = pack(sums, group, GROUPS)
    kept = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(CHOSEN_GROUPS):
        largest = tl.max(ranked, 0)
        kept = tl.where(ranked == largest, 1, kept)
        ranked = tl.where(ranked == largest, LEAST, ranked)
    return tl.reshape(tl.where(kept[:, None] != 0, grouped, LEAST), (BLOCK,))


def _build(experts: int, top_k: int, scores: str, *, dtype: str, weights: str | None = None, groups: int = 1) -> Build:
    biased = groups > 1
    return Build(
        routing_kernel,
        {
            "logits": f"*{dtype}",
            **({"bias": "*fp32"} if biased else {}),
            "weights": f"*{weights or dtype}",
            "ids": "*i64",
            "epsilon": "fp32",
            "scale": "fp32",
        },
        {
            **({} if biased else {"bias": None}),
            "EXPERTS": experts,
            "TOP_K": top_k,
            "SCORES": scores,
            "GROUPS": groups,
            "CHOSEN_GROUPS": max(1, groups // 2),
            "BEST": 2,
            "NORMALISE": scores != "softmax of the chosen",
            "BLOCK": triton.next_power_of_2(experts),
            "BLOCK_TOP_K": triton.next_power_of_2(top_k),
        },
        num_warps=1,
    )


BUILDS = (
    _build(128, 8, "softmax", dtype="bf16"),  # Qwen3
    _build(60, 4, "softmax", dtype="fp16"),  # Qwen2
    _build(8, 2, "softmax", dtype="bf16", weights="fp32"),  # Mixtral
    _build(32, 4, "softmax of the chosen", dtype="bf16"),  # gpt-oss
    _build(256, 8, "sigmoid", dtype="fp32", groups=8),  # DeepSeek
)
