"""gated_delta_step: linear attention of one token with the gated delta rule, without the layer's projections.

A linear attention layer keeps a state of fixed size instead of keys and values. One token takes about forty small
operations: a convolution with its own state, norms of query and key, a decay, the update of the state, and a gated
norm.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, compiler
from torch.nn import functional

from hf_rocm.errors import TierUnavailable
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.probe_cases import Draw
from hf_rocm.ops.registry import Case, Implementation, Operation, refuses_nothing
from hf_rocm.ops.specs.delta import DeltaCall, DeltaSpec
from hf_rocm.ops.triton import delta as triton
from hf_rocm.ops.triton import detect

# Added to the sum of squares of a query or key, as in transformers' function.
SMALLEST = 1e-6


def gated_delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    conv_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """Apply the gated delta rule (https://arxiv.org/abs/2412.06464) to one token per sequence, updating both states.

    query, key: [B, G, D_k], of G key heads. value, gate: [B, G, R, D_v]: R value heads share a key head, H = G · R in
    total. beta, decay: [B, G, R], before sigmoid and softplus. All six are outputs of the layer's projections, in one
    dtype, and may be views. conv_weight: [C, K] with C = 2 · G · D_k + H · D_v channels: first those of the queries,
    then those of the keys and of the values. conv_state: [B, C, K], the last K inputs of every channel. state: [B, H,
    D_k, D_v]. log_rate, bias: [H]. norm_weight: [D_v].

    The inputs of the convolution are appended to `conv_state`; silu follows the convolution; queries and keys are
    divided by their Euclidean norms, queries also by the square root of D_k. Then, for every value head, `state` is
    multiplied by exp(-exp(log_rate) · softplus(decay + bias)), and k ⊗ sigmoid(beta) · (v - k · state) is added to it.
    The output is q · state, RMS-normalised with eps, times norm_weight, times silu(gate). Returns [B, H, D_v].
    """
    call = DeltaCall(
        query, key, value, gate, beta, decay, conv_weight, conv_state, state, log_rate, bias, norm_weight, eps
    )
    spec = specification(call)
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    out: Tensor = serve(call)[0]
    return out


def specification(call: DeltaCall) -> tuple[object, ...]:
    """The fields of a `DeltaSpec`, as a plain tuple with which the implementation is selected."""
    dtype, device = call.query.dtype, call.query.device
    weight_dtype, state_dtype = call.conv_weight.dtype, call.state.dtype
    key_dim, taps = call.query.shape[2], call.conv_state.shape[2]
    group, value_dim = call.value.shape[2:]
    grad = torch.is_grad_enabled() and any(isinstance(part, Tensor) and part.requires_grad for part in call)
    return (dtype, weight_dtype, state_dtype, device, key_dim, value_dim, group, taps, grad)


def refused_in(x: Tensor) -> str | None:
    """Why no tier can serve x's dtype and device, for example because the user requires aiter; None if one can."""
    try:
        _operation.choose((x.dtype, x.dtype, torch.float32, x.device, 128, 128, 2, 4, False))
    except TierUnavailable as error:
        return error.message
    return None


def eager(call: DeltaCall) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, with the operations and roundings of transformers' layer. Also returns the two states."""
    query, key, value, gate, beta, decay, conv_weight, conv_state, state, log_rate, bias, norm_weight, eps = call
    batch, groups, shared, value_dim = value.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    new = torch.cat((query.flatten(1), key.flatten(1), value.flatten(1)), -1)
    conv_state.copy_(torch.cat((conv_state[..., 1:], new.unsqueeze(-1)), -1))
    mixed = functional.silu((conv_state.to(wide) * conv_weight.to(wide)).sum(-1).to(query.dtype))
    sizes = (query.shape[1] * query.shape[2],) * 2
    query, key, value = (part.to(wide) for part in mixed.split((*sizes, groups * shared * value_dim), -1))
    query, key = (unit(part.view(batch, groups, 1, -1)) for part in (query, key))
    query = query / query.shape[-1] ** 0.5
    rate = -log_rate.to(wide).exp() * functional.softplus(decay.to(wide).flatten(1) + bias.to(wide))
    grouped = state.view(batch, groups, shared, *state.shape[2:])
    old = grouped * rate.exp().view(batch, groups, shared, 1, 1)
    retrieved = (old * key.unsqueeze(-1)).sum(-2)
    change = (value.view(batch, groups, shared, value_dim) - retrieved) * beta.sigmoid().to(wide).unsqueeze(-1)
    grouped.copy_(old + key.unsqueeze(-1) * change.unsqueeze(-2))
    out = (grouped * query.unsqueeze(-1)).sum(-2).to(gate.dtype)
    return gated_norm(out, gate, norm_weight, eps).flatten(1, 2), conv_state, state


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS-normalise the last dim of x, and multiply by the weight and by silu(gate). The result has x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = x.to(wide) * (x.to(wide).square().mean(-1, keepdim=True) + eps).rsqrt()
    return (weight * normed.to(x.dtype) * functional.silu(gate.to(wide))).to(x.dtype)


def unit(x: Tensor) -> Tensor:
    """Divide the vectors of the last dim by their Euclidean norms. A zero vector stays zero."""
    return x * (x.square().sum(-1, keepdim=True) + SMALLEST).rsqrt()


def _cases(spec: DeltaSpec) -> Iterator[Case]:
    """Three key heads, in views of wider tensors: one sequence, then two."""
    draw = Draw(spec.dtype, spec.device)
    heads, width = 3 * spec.group, spec.group * spec.value_dim
    channels = 6 * spec.key_dim + heads * spec.value_dim
    sizes = (spec.key_dim, spec.key_dim, width, width)
    for batch in (1, 2):
        query, key, value, gate = draw(batch, 3, sum(sizes)).split(sizes, -1)
        value, gate = (part.unflatten(-1, (spec.group, spec.value_dim)) for part in (value, gate))
        beta, decay = draw(batch, 3, 2 * spec.group).split(spec.group, -1)
        conv_weight = draw(channels, spec.taps).to(spec.weight_dtype)
        conv_state = draw(batch, channels, spec.taps)
        state = draw(batch, heads, spec.key_dim, spec.value_dim).to(spec.state_dtype)
        log_rate, bias = draw(heads), draw(heads)
        norm_weight = draw(spec.value_dim).to(spec.weight_dtype)
        tensors = query, key, value, gate, beta, decay, conv_weight, conv_state, state, log_rate, bias, norm_weight
        yield Case(tensors, (1e-6,))


_operation = Operation(
    "gated_delta_step", DeltaSpec, _cases, family="attention", terms=DeltaCall, recorded=(0, 2, 7, 8)
)
_operation.register(
    Implementation(
        "triton", triton.NAME, triton.refuses, triton.gated_delta_step, detect.checked("gated_delta_step", triton.NAME)
    )
)
_operation.register(Implementation("torch", "formula", refuses_nothing, eager))
_operation.register(Implementation("eager", "formula", refuses_nothing, eager))
