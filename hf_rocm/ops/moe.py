"""experts: routed experts, which are gated MLPs with weights stacked by expert.

The model chooses the experts of every token. This operation applies them and sums their weighted outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, compiler

from hf_rocm import options
from hf_rocm.errors import OptionError
from hf_rocm.ops import moe_torch, probe
from hf_rocm.ops.aiter import moe as aiter
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.pointwise import ACTIVATIONS, CLAMPED
from hf_rocm.ops.probe_cases import LENGTH, LONG, Draw, smaller
from hf_rocm.ops.registry import Case, Implementation, Operation, device_of, refuses_nothing
from hf_rocm.ops.specs.experts import ExpertsCall, ExpertsSpec, Form
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton import experts as triton
from hf_rocm.ops.triton.norm import DTYPES

BOUNDS = tuple(sorted({moe_torch.FEW, triton.PAIRS}))
# In a specification: more pairs than the largest bound.
MANY = 0


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

    x: [T, H] floating-point. gate_up: [E, 2I, H], gate first; down: [E, H, I]; if transposed, [E, H, 2I] and [E, I, H].
    gate_up_bias: [E, 2I] and down_bias: [E, H], both or neither. ids: [T, k] integers, 0 to E − 1, no expert twice for
    one token. weights: [T, k] floating-point; the sum is computed in the wider of their dtype and x's dtype; kernels
    compute it in fp32. interleaved: gate and up alternate along 2I. weigh_input: multiply x, instead of the output, by
    the weight. activation: `silu`, `gelu`, `gelu_tanh`, or `clamped_swiglu`, which is (min(max(up, −limit), limit) + 1)
    · g · sigmoid(alpha · g) with g = min(gate, limit) (gpt-oss). Returns [T, H] in x's dtype.
    Raises `OptionError` for any other activation, and if only one bias is given. Shazeer et al. 2017.
    """
    form = Form(activation, transposed, interleaved, weigh_input, limit, alpha)
    call = ExpertsCall(x, gate_up, down, ids, weights, gate_up_bias, down_bias, form)
    check(call)
    spec = specification(call)
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: Tensor = serve(call)
    return result


def check(call: ExpertsCall) -> None:
    """Raise the errors of `experts`."""
    activation = call.form.activation
    if activation not in ACTIVATIONS:
        raise OptionError(
            f"experts does not support the activation {activation!r}", facts={"known": ", ".join(ACTIVATIONS)}
        )
    if (call.gate_up_bias is None) is not (call.down_bias is None):
        raise OptionError("experts requires both biases or neither")


def specification(call: ExpertsCall) -> tuple[object, ...]:
    """The fields of an `ExpertsSpec`, as a plain tuple with which the implementation is selected."""
    x, gate_up, down, ids, form = call.x, call.gate_up, call.down, call.ids, call.form
    tensors = (x, gate_up, down, call.weights, call.gate_up_bias, call.down_bias)
    grad = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    dtype, weight_dtype, device = x.dtype, gate_up.dtype, x.device
    experts, top_k = gate_up.shape[0], ids.shape[1]
    hidden, intermediate = down.shape[1:]
    if form.transposed:
        hidden, intermediate = intermediate, hidden
    activation, transposed, interleaved, weigh_input, _, _ = form
    bias, contiguous = call.gate_up_bias is not None, gate_up.is_contiguous() and down.is_contiguous()
    pairs, traced = _bound(ids.numel()), compiling() or compiler._is_compiling_flag
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


def _bound(pairs: int) -> int:
    for bound in BOUNDS:
        if pairs <= bound:
            return bound
    return MANY


def max_pairs(x: Tensor) -> int:
    """The largest number of token-expert pairs for which inputs like x [T, H] are served without a grouped GEMM.

    A grouped GEMM may synchronise with the host, which prevents recording. While torch.compile or torch.export
    traces, this is the bound of the torch tier, which does not depend on the device.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.dtype not in DTYPES:
        return moe_torch.FEW
    if options.current().tier("experts") not in (None, "triton") or detect.unavailable(device_of(x)):
        return moe_torch.FEW
    return moe_torch.FEW if probe.failed("experts", "triton", triton.NAME, x.dtype) else triton.PAIRS


def kind(spec: ExpertsSpec) -> ExpertsSpec:
    """A smaller specification whose sizes have the same remainders modulo the block sizes of hf_rocm's kernels."""
    return spec._replace(
        experts=min(spec.experts, max(4, spec.top_k)),
        hidden=smaller(spec.hidden, 512, 512),
        intermediate=smaller(spec.intermediate, 1024, 512),
        pairs=MANY,
        traced=False,
    )


def cases(spec: ExpertsSpec) -> Iterator[Case]:
    """One token, a few tokens, and many. No token uses the last expert, unless every token uses all experts.

    A single token is not checked with gradients: with so few numbers, the eager tier's error would depend on chance.
    """
    draw = Draw(spec.dtype, spec.device)
    sizes = ((2 * spec.intermediate, spec.hidden), (spec.hidden, spec.intermediate))
    stacked = [draw(spec.experts, *(size[::-1] if spec.transposed else size)) * size[1] ** -0.5 for size in sizes]
    biases = [draw(spec.experts, size[0]) if spec.bias else None for size in sizes]
    limit = 2.0
    if spec.grad and spec.activation == CLAMPED:
        # the gradient is discontinuous at the limit: no value may be so close to it that rounding changes the result
        limit = 7.0
        biases[0] = None if biases[0] is None else biases[0].sign() * 14 * (biases[0].abs() > 0.5)
    form = Form(spec.activation, spec.transposed, spec.interleaved, spec.weigh_input, limit=limit, alpha=1.702)
    for tokens in (LENGTH, LONG) if spec.grad else (1, LENGTH, LONG):
        scores = draw(tokens, spec.experts).float()
        scores[:, -1] = -torch.inf
        chosen, ids = (part[:, : spec.top_k] for part in scores.sort(descending=True))
        weights = chosen.nan_to_num(neginf=-9.0).softmax(-1).to(spec.dtype)
        yield Case((draw(tokens, spec.hidden), *stacked, ids, weights, *biases), (form,))


def _never(call: ExpertsCall) -> Tensor:
    raise AssertionError("fused_moe refuses all weights in plain order")


_operation = Operation("experts", ExpertsSpec, cases, kind, terms=ExpertsCall, recorded=(0, 1, 3))
# registered only so that `explain` shows why it refuses: shuffled weights have their own operation
_operation.register(Implementation("aiter", "fused_moe", aiter.plain_refuses, _never))
_operation.register(
    Implementation("triton", triton.NAME, triton.refuses, triton.experts, detect.checked("experts", triton.NAME))
)
_operation.register(Implementation("torch", "gathered weights, bmm", moe_torch.gathered_refuses, moe_torch.gathered))
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
_operation.register(Implementation("eager", "loop", refuses_nothing, moe_torch.eager))
