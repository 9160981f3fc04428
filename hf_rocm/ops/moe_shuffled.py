"""Routed experts with weights of type `Shuffled`, in the order that aiter's `fused_moe` reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, compiler

from hf_rocm.errors import OptionError
from hf_rocm.ops import moe_torch
from hf_rocm.ops.aiter import moe as aiter
from hf_rocm.ops.aiter.detect import checked
from hf_rocm.ops.aiter.layout import COLUMNS, ROWS
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.moe import cases, kind, specification
from hf_rocm.ops.registry import Case, Implementation, Operation, refuses_nothing
from hf_rocm.ops.shuffled import Shuffled, shuffle, unshuffle
from hf_rocm.ops.specs.experts import ExpertsCall, ExpertsSpec, Form

PLAIN = Form()


def shuffle_experts(weight: Tensor) -> Shuffled:
    """Copy stacked weights [E, N, K] of a 16-bit dtype into aiter's order, expert by expert.

    Raises `OptionError` unless the weights have three dims and a 16-bit dtype, N is a multiple of 16, and K is a
    multiple of 32.
    """
    if weight.dim() != 3 or weight.shape[1] % ROWS:
        raise OptionError(
            "the experts' weights can't be shuffled",
            facts={"expected": f"[E, N, K], N a multiple of {ROWS}", "found": f"{list(weight.shape)}"},
        )
    # no tile spans two experts, so the E · N rows are shuffled as one matrix
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
    """`hf_rocm.ops.experts` for shuffled gate_up [E, 2I, H] and down [E, H, I], without biases.

    x: [T, H] bf16 or fp16; ids, weights: [T, k]; activation: see `experts`. Returns [T, H] in x's dtype.
    """
    form = PLAIN._replace(activation=activation)
    call = ExpertsCall(x, gate_up.data, down.data, ids, weights, None, None, form)
    spec = specification(call)
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: Tensor = serve(call)
    return result


def aiter_refuses(gate_up: Tensor, down: Tensor, top_k: int) -> str | None:
    """The reason why no aiter kernel uses shuffled copies of these weights on their device, as a sentence, or None."""
    n, k = gate_up.shape[1:]
    if gate_up.element_size() != 2 or n % ROWS or k % COLUMNS or down.shape[1] % ROWS or down.shape[2] % COLUMNS:
        return f"only 16-bit weights with N a multiple of {ROWS} and K a multiple of {COLUMNS} can be shuffled"
    ids = torch.zeros(1, top_k, dtype=torch.int64, device=gate_up.device)
    with torch.no_grad():
        spec = specification(ExpertsCall(gate_up[0, :1], gate_up, down, ids, ids.to(torch.float32), None, None, PLAIN))
    choice = _operation.choose(spec)
    if choice.implementation.tier == "aiter":
        return None
    return next(
        (refusal.reason for refusal in choice.refusals if refusal.tier == "aiter"), "the aiter tier is switched off"
    )


def _unshuffling(experts: Callable[[ExpertsCall], Tensor]) -> Callable[[ExpertsCall], Tensor]:
    """Return a function that unshuffles the weights on every call: correct but slow."""

    def shuffled(call: ExpertsCall) -> Tensor:
        return experts(call._replace(gate_up=_plain(call.gate_up), down=_plain(call.down)))

    return shuffled


def _plain(data: Tensor) -> Tensor:
    return unshuffle(data.reshape(-1, data.shape[2])).view(data.shape)


def _cases(spec: ExpertsSpec) -> Iterator[Case]:
    for case in cases(spec):
        x, gate_up, down, *rest = case.tensors
        assert gate_up is not None and down is not None
        yield Case((x, shuffle_experts(gate_up).data, shuffle_experts(down).data, *rest), case.others)


_operation = Operation(
    "shuffled_experts", ExpertsSpec, _cases, kind, family="experts", terms=ExpertsCall, recorded=(0, 1, 3)
)
_operation.register(
    Implementation(
        "aiter", "fused_moe", aiter.shuffled_refuses, aiter.shuffled_experts, checked("shuffled_experts", "fused_moe")
    )
)
_operation.register(Implementation("torch", "unshuffle, loop", refuses_nothing, _unshuffling(moe_torch.sorted_loop)))
_operation.register(Implementation("eager", "unshuffle, loop", refuses_nothing, _unshuffling(moe_torch.eager)))
