"""Stand-ins for the kernels of `fused_moe`: sorting by expert, and the two GEMMs with shuffled weights."""

from __future__ import annotations

import torch
from torch import Tensor

from .strict import need

# A sorted id has the token in its low 24 bits, and the index among the token's experts in its upper 8 bits.
SLOT = 24


def moe_sorting_fwd(
    topk_ids: Tensor,
    topk_weights: Tensor,
    sorted_token_ids: Tensor,
    sorted_weights: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    moe_buf: Tensor,
    num_experts: int,
    unit_size: int,
    local_expert_mask: Tensor | None = None,
    num_local_tokens: Tensor | None = None,
    dispatch_policy: int = 0,
) -> None:
    """Write the (token, index) pairs of every expert, padded to whole blocks with a token that doesn't exist."""
    need(topk_ids.dtype == torch.int32 and topk_weights.dtype == torch.float32, "ids must be int32 and weights fp32")
    need(topk_ids.is_contiguous() and topk_weights.is_contiguous(), "ids and weights must be contiguous")
    tokens, top = topk_ids.shape
    row = block = 0
    for expert in range(num_experts):
        pairs = (topk_ids == expert).nonzero().tolist()
        while pairs:
            part, pairs = pairs[:unit_size], pairs[unit_size:]
            sorted_expert_ids[block] = expert
            for index in range(unit_size):
                token, slot = part[index] if index < len(part) else (tokens, top)
                sorted_token_ids[row] = token | slot << SLOT
                sorted_weights[row] = topk_weights[token, slot] if index < len(part) else 0.0
                row += 1
            block += 1
    num_valid_ids[0], num_valid_ids[1] = row, tokens
    moe_buf.zero_()


def _pairs(sorted_ids: Tensor, expert_ids: Tensor, valid: Tensor, tokens: int, block_m: int) -> list[tuple[int, ...]]:
    rows = sorted_ids[: int(valid[0])].tolist()
    experts = [int(expert_ids[row // block_m]) for row in range(len(rows))]
    result = [
        (row, entry & (1 << SLOT) - 1, entry >> SLOT, expert)
        for row, (entry, expert) in enumerate(zip(rows, experts, strict=True))
    ]
    return [pair for pair in result if pair[1] < tokens]


def _plain(weight: Tensor) -> Tensor:
    """Restore plain rows from the order that the kernels read: tiles of 16 rows by 32 columns, in runs of 8."""
    need(weight.is_contiguous(), "weights must be contiguous")
    experts, n, k = weight.shape
    tiles = weight.reshape(experts, n // 16, k // 32, 4, 16, 8)
    return tiles.permute(0, 1, 4, 2, 3, 5).reshape(experts, n, k).float()


def ck_moe_stage1(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    out: Tensor,
    topk: int,
    kernelName: str | None = None,
    w1_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    block_m: int | None = 32,
    sorted_weights: Tensor | None = None,
    quant_type: int = 0,
    activation: int = 0,
) -> None:
    need(
        hidden_states.is_contiguous() and w1.dtype == hidden_states.dtype,
        "hidden states must be contiguous and have the weights' dtype",
    )
    need(activation == 0 and quant_type == 0 and sorted_weights is None, "not supported by this stand-in")
    weight = _plain(w1)
    pairs = _pairs(sorted_token_ids, sorted_expert_ids, num_valid_ids, len(hidden_states), block_m or 32)
    for _, token, slot, expert in pairs:
        gate, up = (weight[expert] @ hidden_states[token].float()).chunk(2)
        out[token, slot] = torch.nn.functional.silu(gate) * up


def ck_moe_stage2(
    inter_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    out: Tensor,
    topk: int,
    kernelName: str | None = None,
    w2_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_m: int | None = 32,
    sorted_weights: Tensor | None = None,
    quant_type: int = 0,
    activation: int = 0,
) -> None:
    need(sorted_weights is not None, "the second GEMM needs the routing weights")
    assert sorted_weights is not None
    weight, total = _plain(w2), out.float()
    for row, token, slot, expert in _pairs(sorted_token_ids, sorted_expert_ids, num_valid_ids, len(out), block_m or 32):
        total[token] += weight[expert] @ inter_states[token, slot].float() * sorted_weights[row]
    out.copy_(total)
