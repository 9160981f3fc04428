"""experts: the routed experts of a mixture, each a gated MLP, on weights stacked by expert.

Routing is the model's; here every token meets the experts that were chosen for it, and their outputs are summed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_rocm import options
from hf_rocm.errors import OptionError
from hf_rocm.ops import moe_torch, probe
from hf_rocm.ops.aiter import moe as aiter
from hf_rocm.ops.moe_torch import ACTIVATIONS, Form, eager
from hf_rocm.ops.registry import Implementation, Operation, device_of, refuses_nothing, route
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton import experts as triton
from hf_rocm.ops.triton.norm import DTYPES

BOUNDS = tuple(sorted({moe_torch.FEW, triton.PAIRS}))
MANY = 0  # in a specification: more pairs than any of them


class ExpertsSpec(NamedTuple):
    """What the choice of an implementation depends on. experts: E; hidden: H; intermediate: I; top: k."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    experts: int
    hidden: int
    intermediate: int
    top: int
    activation: str
    bias: bool
    transposed: bool
    interleaved: bool
    weigh_input: bool
    contiguous: bool  # both weights
    pairs: int  # T · k up to this one of `BOUNDS`, as in decoding, or MANY
    traced: bool
    grad: bool


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    weigh_input: bool = False,
    limit: float = 7.0,
    alpha: float = 1.702,
) -> Tensor:
    """Σ_j weights[t, j] · down_e(act(gate_e(x_t)) · up_e(x_t)) with e = ids[t, j].

    x: [T, H] floating. gate_up: [E, 2I, H], gate first; down: [E, H, I]; with transposed [E, H, 2I] and [E, I, H].
    gate_up_bias: [E, 2I] and down_bias: [E, H], both or neither. ids: [T, k] integers, 0 to E − 1, no expert twice for
    one token. weights: [T, k] floating; the sum is taken in the wider of its dtype and x's, by kernels in fp32.
    interleaved: gate and up alternate along 2I. weigh_input: x is multiplied by the weight, not the output.
    activation: `silu`, `gelu`, `gelu_tanh`, or `clamped_swiglu`, which is (min(max(up, −limit), limit) + 1) · g ·
    sigmoid(alpha · g) with g = min(gate, limit) (gpt-oss). Returns [T, H] in x's dtype.
    Raises `OptionError` on another activation, or a bias without the other. Shazeer et al. 2017.
    """
    if activation not in ACTIVATIONS:
        raise OptionError(f"experts has no activation {activation!r}", facts={"known": ", ".join(ACTIVATIONS)})
    if (gate_up_bias is None) is not (down_bias is None):
        raise OptionError("experts takes both biases or neither")
    form = Form(activation, transposed, interleaved, weigh_input, limit, alpha)
    key = specification(x, gate_up, down, ids, weights, gate_up_bias, down_bias, form)
    call = route(_operation, key, x, gate_up, ids)
    result: Tensor = call(x, gate_up, down, ids, weights, gate_up_bias, down_bias, form)
    return result


def specification(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    form: Form,
) -> tuple[object, ...]:
    """The fields of an `ExpertsSpec`, as a plain tuple."""
    tensors = (x, gate_up, down, weights, gate_up_bias, down_bias)
    grad = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
    hidden, intermediate = down.shape[1:]
    if form.transposed:
        hidden, intermediate = intermediate, hidden
    return (
        x.dtype,
        gate_up.dtype,
        x.device,
        gate_up.shape[0],
        hidden,
        intermediate,
        ids.shape[1],
        form.activation,
        gate_up_bias is not None,
        form.transposed,
        form.interleaved,
        form.weigh_input,
        gate_up.is_contiguous() and down.is_contiguous(),
        _bound(ids.numel()),
        torch.compiler.is_compiling(),
        grad,
    )


def _bound(pairs: int) -> int:
    for bound in BOUNDS:
        if pairs <= bound:
            return bound
    return MANY


def most_pairs(x: Tensor) -> int:
    """T · k up to which an implementation for few pairs, that can be recorded in a graph, serves inputs like x [T, H].

    While torch.compile traces it is the torch tier's bound, which asks nobody.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.dtype not in DTYPES:
        return moe_torch.FEW
    if options.current().tier("experts") not in (None, "triton") or detect.unavailable(device_of(x)):
        return moe_torch.FEW
    return moe_torch.FEW if probe.failed("experts", "triton", triton.NAME) else triton.PAIRS


_operation = Operation("experts", ExpertsSpec)
_operation.register(Implementation("aiter", "fused_moe", aiter.plain_refuses, eager))
_operation.register(
    Implementation("triton", triton.NAME, triton.refuses, triton.experts, detect.checked("experts", triton.NAME))
)
_operation.register(
    Implementation(
        "torch",
        "gathered weights, bmm",
        moe_torch.gathered_refuses,
        moe_torch.gathered,
    )
)
_operation.register(
    Implementation(
        "torch",
        "grouped_mm",
        moe_torch.grouped_refuses,
        moe_torch.grouped,
        probe.checked_here("experts", "grouped_mm", tier="torch"),
    )
)
_operation.register(Implementation("torch", "sorted tokens, loop", refuses_nothing, moe_torch.sorted_loop))
_operation.register(Implementation("eager", "loop", refuses_nothing, eager))
