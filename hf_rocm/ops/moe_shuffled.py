"""Routed experts on preshuffled weights: the order that aiter's `fused_moe` reads, in the type of `ops.shuffle`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_rocm.errors import OptionError
from hf_rocm.ops import moe_torch
from hf_rocm.ops.aiter import moe as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.moe import ExpertsSpec, specification
from hf_rocm.ops.moe_torch import Form
from hf_rocm.ops.registry import Implementation, Operation, refuses_nothing, route
from hf_rocm.ops.shuffled import COLUMNS, ROWS, Shuffled, shuffle, unshuffle

PLAIN = Form("silu", transposed=False, interleaved=False, weigh_input=False, limit=7.0, alpha=1.702)


def shuffle_experts(weight: Tensor) -> Shuffled:
    """Bring stacked weights [E, N, K] of a 16-bit dtype into aiter's order, expert by expert, as a copy.

    Raises `OptionError` unless N is a multiple of 16 and K of 32.
    """
    if weight.dim() != 3:
        raise OptionError("experts are stacked", facts={"expected": "[E, N, K]", "found": f"{list(weight.shape)}"})
    # tiles don't cross rows of one expert, so that E · N rows are shuffled as one matrix
    return Shuffled(shuffle(weight.reshape(-1, weight.shape[2])).data.view(weight.shape))


def shuffled_experts(
    x: Tensor,
    gate_up: Shuffled,
    down: Shuffled,
    ids: Tensor,
    weights: Tensor,
    *,
    activation: str = "silu",
) -> Tensor:
    """`hf_rocm.ops.experts` for shuffled gate_up [E, 2I, H] and down [E, H, I], without biases."""
    form = PLAIN._replace(activation=activation)
    key = specification(x, gate_up.data, down.data, ids, weights, None, None, form)
    call = route(_operation, key, x, gate_up.data, ids)
    result: Tensor = call(x, gate_up.data, down.data, ids, weights, None, None, form)
    return result


def aiter_refuses(gate_up: Tensor, down: Tensor, top: int) -> str | None:
    """Why no kernel of aiter would read shuffled copies of these weights here, in a sentence, or None."""
    n, k = gate_up.shape[1:]
    if gate_up.element_size() != 2 or n % ROWS or k % COLUMNS or down.shape[1] % ROWS or down.shape[2] % COLUMNS:
        return f"only 16 bits, N in multiples of {ROWS} and K of {COLUMNS} are shuffled"
    ids = torch.zeros(1, top, dtype=torch.int64, device=gate_up.device)
    with torch.no_grad():
        key = specification(gate_up[0, :1], gate_up, down, ids, ids.to(torch.float32), None, None, PLAIN)
    choice = _operation.choose(key)
    if choice.implementation.tier == "aiter":
        return None
    return next((each.reason for each in choice.refusals if each.tier == "aiter"), "the aiter tier is switched off")


def _unshuffling(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Right, not fast: the weights are put in order at every call."""

    def shuffled(x: Tensor, gate_up: Tensor, down: Tensor, *rest: object) -> Tensor:
        return call(x, _plain(gate_up), _plain(down), *rest)

    return shuffled


def _plain(data: Tensor) -> Tensor:
    return unshuffle(data.reshape(-1, data.shape[2])).view(data.shape)


_operation = Operation("shuffled_experts", ExpertsSpec, family="experts")
_operation.register(
    Implementation(
        "aiter", "fused_moe", aiter.shuffled_refuses, aiter.shuffled_experts, checked("shuffled_experts", "fused_moe")
    )
)
_operation.register(Implementation("torch", "unshuffle, loop", refuses_nothing, _unshuffling(moe_torch.sorted_loop)))
_operation.register(Implementation("eager", "unshuffle, loop", refuses_nothing, _unshuffling(moe_torch.eager)))
