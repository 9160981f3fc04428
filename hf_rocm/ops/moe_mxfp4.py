"""Routed experts with weights in MXFP4, in the layout of gpt-oss's checkpoints, with any supported activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, compiler

from hf_rocm.errors import OptionError
from hf_rocm.ops import moe_torch
from hf_rocm.ops.custom_op import compiling, opaque
from hf_rocm.ops.fakes import like
from hf_rocm.ops.moe import MANY, kind
from hf_rocm.ops.mxfp4 import BLOCK, BYTES, MXFP4, dequantize
from hf_rocm.ops.pointwise import ACTIVATIONS, CLAMPED
from hf_rocm.ops.probe_cases import LENGTH, Draw
from hf_rocm.ops.registry import Case, Implementation, Operation, refuses_nothing
from hf_rocm.ops.specs.experts import ExpertsCall, ExpertsSpec, Form, Mxfp4Call
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton import experts_mxfp4 as triton
from hf_rocm.ops.triton.experts import LARGEST

if TYPE_CHECKING:
    from hf_rocm.device import Device

_LOOP = "dequantize, sorted tokens, loop"
_GROUPED = "dequantize, grouped_mm"
# The largest size in bytes of weights that are dequantised at once, unless one expert is larger.
_TEMPORARY = 2**30


def mxfp4_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_bias: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    *,
    activation: str = CLAMPED,
    limit: float = 7.0,
    alpha: float = 1.702,
) -> Tensor:
    """`hf_rocm.ops.experts` with weights in MXFP4; gate and up are interleaved, as in gpt-oss.

    x: [T, H] floating-point. gate_up: [E, 2I, H / 32, 16] uint8 with scales [E, 2I, H / 32] uint8 and bias [E, 2I].
    down: [E, H, I / 32, 16] with scales [E, H, I / 32] and bias [E, H]. Both biases must be given, or neither.
    ids, weights: [T, k]. activation, limit, alpha: as in `experts`. Returns [T, H] in x's dtype.
    Raises `OptionError` for any other activation, and if only one bias is given.
    """
    if activation not in ACTIVATIONS:
        raise OptionError(
            f"mxfp4_experts does not support the activation {activation!r}", facts={"known": ", ".join(ACTIVATIONS)}
        )
    if (gate_up_bias is None) is not (down_bias is None):
        raise OptionError("mxfp4_experts requires both biases or neither")
    stored = gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias
    call = Mxfp4Call(x, *stored, ids, weights, activation, limit, alpha)
    spec = specification(call)
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: Tensor = serve(call)
    return result


def specification(call: Mxfp4Call) -> tuple[object, ...]:
    """The fields of an `ExpertsSpec`, as a plain tuple with which the implementation is selected."""
    x, gate_up, down, ids = call.x, call.gate_up, call.down, call.ids
    floating = (x, call.weights, call.gate_up_bias, call.down_bias)
    grad = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in floating)
    dtype, weight_dtype, device = x.dtype, gate_up.dtype, x.device
    experts, top_k = gate_up.shape[0], ids.shape[1]
    hidden, intermediate = down.shape[1], down.shape[2] * BLOCK
    activation, bias, transposed, interleaved, weigh_input = (
        call.activation,
        floating[2] is not None,
        False,
        True,
        False,
    )
    stored = (gate_up, call.gate_up_scales, down, call.down_scales)
    contiguous = all(tensor.is_contiguous() for tensor in stored)
    pairs = triton.PAIRS if ids.numel() <= triton.PAIRS else MANY
    traced = compiling() or compiler._is_compiling_flag
    return (
        dtype,
        weight_dtype,
        device,
        experts,
        hidden,
        intermediate,
        top_k,
        activation,
        bias,
        transposed,
        interleaved,
        weigh_input,
        contiguous,
        pairs,
        traced,
        grad,
    )


Dequantize = Callable[[Tensor, Tensor, torch.dtype], Tensor]


class _Stacked:
    """Stacked weights [E, N, K] that are dequantised when they are indexed, by an expert or a slice of experts."""

    def __init__(self, blocks: Tensor, scales: Tensor, dtype: torch.dtype, function: Dequantize) -> None:
        self.blocks, self.scales, self.dtype, self.function = blocks, scales, dtype, function
        self.shape = (*blocks.shape[:2], blocks.shape[2] * BLOCK)
        # The largest number of elements that one launch dequantises.
        numbers = min(_TEMPORARY // dtype.itemsize, LARGEST - 1)
        self.at_once = max(1, numbers // (self.shape[1] * self.shape[2]))

    def __getitem__(self, experts: int | slice) -> Tensor:
        blocks, scales = self.blocks[experts], self.scales[experts]
        with torch.no_grad():
            wide = self.function(blocks.flatten(0, -3), scales.flatten(0, -2), self.dtype)
        return wide.view(*blocks.shape[:-2], self.shape[2])


def _dequantized(experts: Callable[[ExpertsCall], Tensor], function: Dequantize) -> Callable[..., Tensor]:
    """Convert an implementation of `moe_torch` to a function of the fields of an `Mxfp4Call`."""

    def run(*arguments: Any) -> Tensor:
        call = Mxfp4Call(*arguments)
        form = Form(call.activation, False, True, False, limit=call.limit, alpha=call.alpha)
        dtype = call.x.dtype
        gate_up: Any = _Stacked(call.gate_up, call.gate_up_scales, dtype, function)
        down: Any = _Stacked(call.down, call.down_scales, dtype, function)
        return experts(
            ExpertsCall(call.x, gate_up, down, call.ids, call.weights, call.gate_up_bias, call.down_bias, form)
        )

    return run


# Operators, because the loop reads the ids on the host, which torch.compile does not trace.
_loop, _triton_loop = (
    opaque(f"{name}({triton.ARGUMENTS}) -> Tensor", _dequantized(moe_torch.sorted_loop, function), like)
    for name, function in (("mxfp4_experts", dequantize), ("triton_mxfp4_experts_loop", triton.dequantized))
)
_triton_grouped = opaque(
    f"triton_mxfp4_experts_grouped({triton.ARGUMENTS}) -> Tensor",
    _dequantized(moe_torch.grouped, triton.dequantized),
    like,
)
_eager = _dequantized(moe_torch.eager, dequantize)


def loop(call: Mxfp4Call) -> Tensor:
    """Dequantise and apply one expert after another, with PyTorch's operations."""
    result: Tensor = _loop(*call)
    return result


def grouped_refuses(spec: ExpertsSpec, device: Device) -> str | None:
    """Why one kernel can't dequantise several experts at once for `grouped_mm`, or None."""
    reason = triton.kernels_refuse(spec, device)
    if reason is not None:
        return reason
    if spec.grad:
        return "the backward pass would keep the dequantised weights of all experts"
    return moe_torch.grouped_refuses(spec._replace(weight_dtype=spec.dtype, traced=False), device)


def cases(spec: ExpertsSpec) -> Iterator[Case]:
    """One token, and a few tokens. No token is routed to the last expert unless it is routed to all."""
    draw = Draw(spec.dtype, spec.device)

    def stored(n: int, k: int) -> tuple[Tensor, Tensor]:
        shape = spec.experts, n, k // BLOCK
        blocks = torch.randint(256, (*shape, BYTES), generator=draw.generator)
        scales = torch.randint(118, 123, shape, generator=draw.generator)
        return blocks.to(spec.device, MXFP4), scales.to(spec.device, MXFP4)

    gate_up, gate_up_scales = stored(2 * spec.intermediate, spec.hidden)
    down, down_scales = stored(spec.hidden, spec.intermediate)
    biases = [draw(spec.experts, n) if spec.bias else None for n in (2 * spec.intermediate, spec.hidden)]
    for tokens in (1, LENGTH):
        scores = draw(tokens, spec.experts).float()
        scores[:, -1] = -torch.inf
        chosen, ids = (part[:, : spec.top_k] for part in scores.sort(descending=True))
        weights = chosen.nan_to_num(neginf=-9.0).softmax(-1).to(spec.dtype)
        x = draw(tokens, spec.hidden)
        tensors = x, gate_up, gate_up_scales, biases[0], down, down_scales, biases[1], ids, weights
        yield Case(tensors, (spec.activation, 7.0, 1.702))


_operation = Operation("mxfp4_experts", ExpertsSpec, cases, kind, family="experts", terms=Mxfp4Call, recorded=(0, 1, 7))
for _name, _refuses, _call in (
    (triton.NAME, triton.refuses, triton.experts),
    (_GROUPED, grouped_refuses, lambda call: _triton_grouped(*call)),
    (_LOOP, triton.kernels_refuse, lambda call: _triton_loop(*call)),
):
    _operation.register(Implementation("triton", _name, _refuses, _call, detect.checked("mxfp4_experts", _name)))
_operation.register(Implementation("torch", _LOOP, refuses_nothing, loop))
_operation.register(Implementation("eager", "dequantize, loop", refuses_nothing, lambda call: _eager(*call)))
