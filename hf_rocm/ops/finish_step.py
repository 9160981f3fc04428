"""finish_step: compute the outputs of a recorded decode step from its logits in one operation.

The outputs are a copy of the logits, the tokens with the largest logits, a digest with which replays are compared, a
check for values that are not finite, and, in a step that drafts a token, the probability of this token. In separate
operations, they take fifteen kernels or more, most of which are so small that they take longer to launch than to run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_rocm.ops.bits import ROWS, add_doubt, append_digest, sum_of_words
from hf_rocm.ops.bits import words as words_of
from hf_rocm.ops.probe_cases import Draw
from hf_rocm.ops.registry import Case, Implementation, Operation, refuses_nothing, serving
from hf_rocm.ops.specs.step import FinishStepCall, FinishStepSpec
from hf_rocm.ops.triton import step as triton
from hf_rocm.ops.triton.detect import checked as checked_triton
from hf_rocm.ops.triton.launch import power_of_two


def finish_step(
    logits: Tensor,
    out: Tensor,
    tokens: Tensor,
    digests: Tensor,
    doubt: Tensor,
    further: Tensor | None = None,
    probability: Tensor | None = None,
) -> None:
    """Write the outputs that a recorded step computes from its logits to the other tensors, except `further`.

    logits: [B, N, V] floating-point, but not fp64. out: a tensor like logits, which receives a copy of them. tokens:
    [B, N] int64, which receives `logits.argmax(-1)`. digests: [K] int64; the first digest is dropped, and the digest of
    this step is appended: the sum of the bits of the logits (see `ops.bits.words`), of the tokens and of `further`, [1]
    int64. doubt: [] fp32, to which 0 is added if all logits are finite, and otherwise another number or NaN.
    If the sum of finite logits overflows fp32, the torch tier adds NaN too. probability: [1] fp32 or None, which
    receives the probability of the last of the tokens: the softmax of its row, computed in fp32.
    """
    call = FinishStepCall(logits, words_of(logits), out, tokens, digests, doubt, further, probability)
    serving(_operation, _specification(call), torch_finish_step)(call)


def _specification(call: FinishStepCall) -> tuple[object, ...]:
    logits, further, probable = call.logits, call.further is not None, call.probability is not None
    contiguous = all(tensor.is_contiguous() for tensor in (logits, call.words, call.out, call.tokens, call.digests))
    grad = torch.is_grad_enabled() and logits.requires_grad
    dtype, words_dtype, device = logits.dtype, call.words.dtype, logits.device
    rows, dim, kept = call.tokens.numel(), logits.shape[-1], len(call.digests)
    return (dtype, words_dtype, device, rows, dim, kept, further, probable, contiguous, grad)


def argmax(logits: Tensor) -> Tensor:
    """`logits.argmax(-1)`, in two stages. On a GPU, one stage takes several times as long: few compute units run it."""
    count = logits.shape[-1]
    parts = math.gcd(count, ROWS)
    if parts == 1:
        return logits.argmax(-1)
    values, indices = logits.unflatten(-1, (parts, count // parts)).max(-1)
    # The first of several equal values, as in one stage.
    part = values.argmax(-1, keepdim=True)
    return (indices.gather(-1, part) + part * (count // parts)).squeeze(-1)


def torch_finish_step(call: FinishStepCall) -> tuple[Tensor, ...]:
    """PyTorch's operations. Adds to doubt with `add_doubt`. Returns the tensors that it wrote to, except out."""
    add_doubt(call.doubt, call.logits)
    return _finish(call, argmax(call.logits))


def eager_finish_step(call: FinishStepCall) -> tuple[Tensor, ...]:
    """The oracle, with PyTorch's own argmax. Adds the number of logits that are not finite to doubt."""
    call.doubt.add_((~call.logits.isfinite()).sum())
    return _finish(call, call.logits.argmax(-1))


def _finish(call: FinishStepCall, largest: Tensor) -> tuple[Tensor, ...]:
    call.out.copy_(call.logits)
    call.tokens.copy_(largest)
    append_digest(call.digests, sum_of_words([call.words, largest, *([] if call.further is None else [call.further])]))
    if call.probability is None:
        return call.tokens, call.digests, call.doubt
    probabilities = call.logits[-1, -1].to(call.probability.dtype).softmax(-1)
    call.probability.copy_(probabilities.gather(0, largest[-1, -1:]))
    return call.tokens, call.digests, call.doubt, call.probability


def _kind(spec: FinishStepSpec) -> FinishStepSpec:
    """Round the rows up to a power of two, and reduce the columns so that `triton.parts` does not change."""
    rows = power_of_two(spec.rows)
    columns = 2 * triton.BLOCK * triton.parts(rows, spec.dim) + spec.dim % triton.BLOCK
    return spec._replace(rows=rows, dim=min(spec.dim, columns))


def _cases(spec: FinishStepSpec) -> Iterator[Case]:
    """Yield two calls in which the two largest logits of a row are equal, so that the first one must be chosen.

    In the second call, some logits are not finite, so there is no probability to compare.
    """
    draw = Draw(spec.dtype, spec.device)
    rows, dim = spec.rows, spec.dim
    logits = draw(rows, 1, dim)
    first = (torch.arange(rows, device=spec.device) * 7919 + dim // 3) % dim
    for place in (first, (first + dim // 2) % dim):
        logits.scatter_(-1, place[:, None, None], 8.0)
    bad = logits.clone()
    bad[0, 0, dim // 2], bad[-1, 0, 0] = torch.inf, torch.nan
    integers: dict[str, Any] = {"dtype": torch.int64, "device": spec.device}
    for values in (logits, bad):
        yield Case(
            (
                values,
                words_of(values),
                torch.zeros_like(values),
                torch.zeros(rows, 1, **integers),
                torch.arange(spec.kept, **integers),
                torch.zeros((), device=spec.device),
                torch.tensor([12345], **integers) if spec.further else None,
                torch.zeros(1, dtype=torch.float32, device=spec.device) if spec.probable and values is logits else None,
            )
        )


_operation = Operation(
    "finish_step", FinishStepSpec, _cases, kind=_kind, family="linear", terms=FinishStepCall, recorded=(0,)
)
_operation.register(
    Implementation(
        "triton", triton.NAME, triton.refuses, triton.finish_step, checked_triton("finish_step", triton.NAME)
    )
)
_operation.register(Implementation("torch", "argmax, sums", refuses_nothing, torch_finish_step))
_operation.register(Implementation("eager", "argmax, sums", refuses_nothing, eager_finish_step))
