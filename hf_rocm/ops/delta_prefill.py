"""gated_delta_prefill: linear attention with the gated delta rule, for the tokens of a prompt.

Token by token, a prompt requires a long sequence of small operations, each of which depends on the previous one. In
chunks, most of the work is large GEMMs, and only the states at the ends of the chunks depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, compiler
from torch.nn import functional

from hf_rocm.ops import delta
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.probe_cases import LENGTH, Draw
from hf_rocm.ops.registry import Case, Implementation, Operation, refuses_nothing
from hf_rocm.ops.specs.delta import DeltaCall, DeltaSpec, PrefillCall
from hf_rocm.ops.triton import delta_prefill as triton
from hf_rocm.ops.triton import detect

# Tokens per chunk in PyTorch, as in transformers' function.
CHUNK = 64


def gated_delta_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    conv_weight: Tensor,
    conv_state: Tensor | None = None,
    state: Tensor | None = None,
    log_rate: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the gated delta rule (https://arxiv.org/abs/2412.06464) to the tokens of a prompt, in chunks.

    query, key: [B, S, G, D_k], of G key heads. value, gate: [B, S, G, R, D_v]: R value heads share a key head, and
    H = G · R. beta, decay: [B, S, G, R], before sigmoid and softplus. conv_state: [B, C, K], the last inputs of the
    convolution before the prompt. state: [B, H, D_k, D_v]. Both are None at the start of a sequence, and neither is
    changed. The other arguments are those of `gated_delta_step`, and each token is computed as by `gated_delta_step`.

    Returns the output [B, S, H, D_v], and both states after the last token. If no state is given, the returned
    recurrent state is in fp32 (fp64 for fp64).
    """
    call = PrefillCall(
        query, key, value, gate, beta, decay, conv_weight, conv_state, state, log_rate, bias, norm_weight, eps
    )
    spec = specification(call)
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: tuple[Tensor, Tensor, Tensor] = serve(call)
    return result


def specification(call: PrefillCall) -> tuple[object, ...]:
    """The fields of a `DeltaSpec`, as a plain tuple with which the implementation is selected."""
    dtype, weight_dtype, device = call.query.dtype, call.conv_weight.dtype, call.query.device
    state_dtype = _wide(call) if call.state is None else call.state.dtype
    group, value_dim = call.value.shape[3:]
    key_dim, taps = call.query.shape[3], call.conv_weight.shape[1]
    grad = torch.is_grad_enabled() and any(isinstance(part, Tensor) and part.requires_grad for part in call)
    return (dtype, weight_dtype, state_dtype, device, key_dim, value_dim, group, taps, grad)


def eager(call: PrefillCall) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: `gated_delta_step` for one token after another."""
    conv_state, state = (known.clone() for known in _states(call))
    terms = call.conv_weight, conv_state, state, call.log_rate, call.bias, call.norm_weight, call.eps
    outputs = [
        delta.eager(DeltaCall._make((*(part[:, token] for part in call[:6]), *terms)))[0]
        for token in range(call.query.shape[1])
    ]
    empty = call.gate.new_empty((call.gate.shape[0], 0, state.shape[1], call.gate.shape[-1]))
    return torch.stack(outputs, 1) if outputs else empty, conv_state, state


def chunked(call: PrefillCall) -> tuple[Tensor, Tensor, Tensor]:
    """The chunked form in PyTorch, as `hf_rocm/ops/triton/kernels/delta_prefill.py` describes it."""
    batch, length, groups, shared, value_dim = call.value.shape
    if not length:
        return eager(call)
    conv_state, state = _states(call)
    wide, chunks = _wide(call), -(-length // CHUNK)
    new = torch.cat([part.flatten(2) for part in call[:3]], -1).transpose(1, 2)  # [B, C, S]
    padded = torch.cat((conv_state, new), -1)
    taps, channels = call.conv_weight.shape[1], call.conv_weight.shape[0]
    kernel = call.conv_weight.to(wide).unsqueeze(1)
    mixed = functional.conv1d(padded[..., 1:].to(wide), kernel, groups=channels)
    mixed = functional.silu(mixed.to(call.query.dtype).to(wide)).transpose(1, 2)
    keys = groups * call.query.shape[3]

    def in_chunks(x: Tensor) -> Tensor:  # [B, S, …] to [B, N, CHUNK, …]
        x = torch.cat((x, x.new_zeros((batch, chunks * CHUNK - length, *x.shape[2:]))), 1)
        return x.unflatten(1, (chunks, CHUNK))

    query, key, value = (
        in_chunks(part.unflatten(-1, (groups, -1)))
        for part in mixed.split((keys, keys, groups * shared * value_dim), -1)
    )
    query, key = (delta.unit(part).permute(1, 0, 3, 2, 4) for part in (query, key))  # [N, B, G, CHUNK, D_k]
    query = query / query.shape[-1] ** 0.5
    value = value.unflatten(-1, (shared, value_dim)).permute(1, 0, 3, 4, 2, 5)  # [N, B, G, R, CHUNK, D_v]
    gates = -call.log_rate.to(wide).exp() * functional.softplus(call.decay.to(wide).flatten(2) + call.bias.to(wide))
    gates = in_chunks(gates.unflatten(-1, (groups, shared))).permute(1, 0, 3, 4, 2)  # [N, B, G, R, CHUNK]
    strength = in_chunks(call.beta.sigmoid().to(wide)).permute(1, 0, 3, 4, 2)

    # the decay from token j to token i: sums of the gates between them, because differences of cumulative sums are less
    # accurate
    between = gates.unsqueeze(-1).expand(*gates.shape, CHUNK).tril(-1).cumsum(-2)
    decay = between.exp().tril()
    start, end = gates.cumsum(-1).exp().unsqueeze(-1), between[..., -1, :].exp().unsqueeze(-1)
    below = (key @ key.mT).unsqueeze(3) * decay * strength.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(below, torch.diag_embed(strength), upper=False, unitriangular=True)
    within = (query @ key.mT).unsqueeze(3) * decay

    memory = state.to(wide).unflatten(1, (groups, shared))  # [B, G, R, D_k, D_v]
    outputs = []
    for chunk in range(chunks):
        # the value heads of a group share its key head, so their states can be concatenated into one matrix
        joined = memory.transpose(2, 3).flatten(3)
        both = torch.cat((query[chunk], key[chunk]), -2) @ joined
        read = both.unflatten(-1, (shared, value_dim)).transpose(2, 3) * start[chunk].repeat(1, 1, 1, 2, 1)
        change = solved[chunk] @ (value[chunk] - read[..., CHUNK:, :])
        outputs.append(read[..., :CHUNK, :] + within[chunk] @ change)
        written = key[chunk].mT @ (change * end[chunk]).transpose(2, 3).flatten(3)
        memory = memory * start[chunk][..., -1:, :] + written.unflatten(-1, (shared, value_dim)).transpose(2, 3)
    out = torch.stack(outputs, 1).permute(0, 1, 4, 2, 3, 5).flatten(1, 2)[:, :length]  # [B, S, G, R, D_v]
    gated = delta.gated_norm(out.to(call.gate.dtype), call.gate, call.norm_weight, call.eps)
    return gated.flatten(2, 3), padded[..., -taps:].clone(), memory.flatten(1, 2)


def _states(call: PrefillCall) -> tuple[Tensor, Tensor]:
    """The states before the prompt, which are zero at the start of a sequence."""
    batch, _, groups, shared, value_dim = call.value.shape
    conv_state, state = call.conv_state, call.state
    if conv_state is None:
        conv_state = call.query.new_zeros((batch, *call.conv_weight.shape))
    if state is None:
        shape = (batch, groups * shared, call.query.shape[3], value_dim)
        state = call.query.new_zeros(shape, dtype=_wide(call))
    return conv_state, state


def _wide(call: PrefillCall) -> torch.dtype:
    return torch.promote_types(call.query.dtype, torch.float32)


def _cases(spec: DeltaSpec) -> Iterator[Case]:
    """Prompts of two new sequences, then of one that has states; three key heads, in views of wider tensors."""
    draw = Draw(spec.dtype, spec.device)
    heads, width = 3 * spec.group, spec.group * spec.value_dim
    channels = 6 * spec.key_dim + heads * spec.value_dim
    sizes = (spec.key_dim, spec.key_dim, width, width)
    for batch, length in ((2, LENGTH), (1, 2 * LENGTH)):
        query, key, value, gate = draw(batch, length, 3, sum(sizes)).split(sizes, -1)
        value, gate = (part.unflatten(-1, (spec.group, spec.value_dim)) for part in (value, gate))
        beta, decay = draw(batch, length, 3, 2 * spec.group).split(spec.group, -1)
        conv_weight = draw(channels, spec.taps).to(spec.weight_dtype)
        states: tuple[Tensor | None, Tensor | None] = (None, None)
        if batch == 1:
            state = draw(batch, heads, spec.key_dim, spec.value_dim).to(spec.state_dtype)
            states = draw(batch, channels, spec.taps), state
        norm_weight = draw(spec.value_dim).to(spec.weight_dtype)
        tensors = query, key, value, gate, beta, decay, conv_weight, *states, draw(heads), draw(heads), norm_weight
        yield Case(tensors, (1e-6,))


_operation = Operation("gated_delta_prefill", DeltaSpec, _cases, family="attention", terms=PrefillCall, recorded=(0, 2))
_operation.register(
    Implementation(
        "triton",
        triton.NAME,
        triton.refuses,
        triton.gated_delta_prefill,
        detect.checked("gated_delta_prefill", triton.NAME),
    )
)
_operation.register(Implementation("torch", "chunked", refuses_nothing, chunked))
_operation.register(Implementation("eager", "formula", refuses_nothing, eager))
