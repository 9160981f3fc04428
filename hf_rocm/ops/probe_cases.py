"""The tiny cases of each operation, and the comparison with the eager tier under the derived tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm.ops import registry

if TYPE_CHECKING:
    from hf_rocm.ops.activation import ActivationSpec
    from hf_rocm.ops.attention import AttentionSpec
    from hf_rocm.ops.decode import DecodeSpec
    from hf_rocm.ops.fused_linear import FusedLinearSpec
    from hf_rocm.ops.linear import LinearSpec
    from hf_rocm.ops.moe import ExpertsSpec
    from hf_rocm.ops.norm import NormSpec
    from hf_rocm.ops.quantized import QuantizedSpec
    from hf_rocm.ops.rope import RopeSpec
    from hf_rocm.ops.rope_into_cache import RopeIntoCacheSpec
    from hf_rocm.ops.varlen import VarlenSpec


class Case(NamedTuple):
    """One call: tensors by position (None where there is none) and the remaining arguments."""

    tensors: tuple[Tensor | None, ...]
    others: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = MappingProxyType({})


LENGTH = 37  # odd, and more than one tile of 32
LONG = 160  # more than the 128 queries from which aiter prefers its assembly kernels
WINDOW = 5
LARGEST_WEIGHT = 2**25  # elements; a larger one is checked by fewer rows


def kind(operation: str, spec: Any) -> tuple[Any, ...]:
    """The specification without what a kernel's correctness can't depend on."""
    if operation in ("attention", "varlen_attention", "decode_attention") and spec.window is not None:
        spec = spec._replace(window=min(spec.window, WINDOW))
    if operation in ("linear", "shuffled_linear", "fused_linear"):
        spec = spec._replace(rows=0)  # a check has products of few rows and of many
    if operation == "fused_linear":  # what its tiles go by stays as it is
        spec = spec._replace(n=_smaller(spec.n, 4160), k=spec.k if spec.k <= 2048 else 1024 + spec.k % 1024)
    if operation == "decode_attention":
        spec = spec._replace(ends=False)
    if operation in ("experts", "shuffled_experts"):
        spec = spec._replace(
            experts=min(spec.experts, max(4, spec.top)),
            hidden=_smaller(spec.hidden, 512, 512),  # so that the blocks of our kernels divide it, or don't
            intermediate=_smaller(spec.intermediate, 1024, 512),
            pairs=0,
            traced=False,
        )
    return tuple(spec)


def _smaller(size: int, most: int, power: int = 64) -> int:
    """At most about `most`, and as divisible by powers of two up to this one."""
    return size if size <= most else most + size % power


def check(operation: str, tier: str, name: str, values: tuple[Any, ...]) -> str | None:
    """Run the implementation on every case of this kind: what is wrong with it, in a sentence, or None."""
    known = registry.operations()[operation]
    candidates = {(each.tier, each.name): each for each in known.implementations}
    call = candidates[tier, name].call
    eager = next(each.call for each in known.implementations if each.tier == "eager")
    spec = known.spec_type(*values)
    with torch.inference_mode(False), torch.set_grad_enabled(bool(spec.grad)):
        for case in _CASES[operation](spec):
            try:
                actual = _run(call, case, torch.Tensor.clone, spec)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - kernels raise anything, failed builds exit
                lines = str(error).strip().splitlines() or ["no message"]
                return f"it raised {type(error).__name__}: {lines[0]}"
            expected = _run(eager, case, torch.Tensor.double, spec)
            measure = _run(eager, case, torch.Tensor.clone, spec)
            for one, its_measure, its_expected in zip(actual, measure, expected, strict=True):
                reason = disagreement(one, its_measure, its_expected)
                if reason is not None:
                    return reason
    return None


def disagreement(actual: Tensor, eager: Tensor, expected: Tensor) -> str | None:
    """Why `actual` is no good: at most twice as wrong as eager in the same dtype, plus one rounding step.

    expected: in fp64.
    """
    if actual.shape != expected.shape:
        return f"its output is {list(actual.shape)}, not {list(expected.shape)}"
    if not torch.isfinite(actual).all():
        return "its output is not finite"
    eager_error = (eager.double() - expected).abs().max().item()
    allowed = 2 * eager_error + torch.finfo(eager.dtype).eps * expected.abs().max().item()
    error = (actual.double() - expected).abs().max().item()
    if error > allowed:
        return f"its output is wrong by {error:.3g}, and {allowed:.3g} is allowed"
    return None


def _run(function: Callable[..., Any], case: Case, convert: Callable[[Tensor], Tensor], spec: Any) -> list[Tensor]:
    """The outputs, and with gradients those of the inputs. Every run has its own copy: kernels may write anywhere."""
    tensors = [_converted(each, convert) for each in case.tensors]
    keywords = {key: _converted(each, convert) for key, each in case.keywords.items()}
    if spec.grad:
        for each in tensors:
            if each is not None and each.is_floating_point():
                each.requires_grad_()
    result = function(*tensors, *case.others, **keywords)
    if spec is not None and hasattr(spec, "weights"):  # attention: its weights are eager's alone
        result = result[0]
    outputs = list(result) if isinstance(result, tuple) else [result]
    if not spec.grad:
        return outputs
    inputs = [each for each in tensors if each is not None and each.requires_grad]
    ramps = [torch.linspace(-1, 1, each.shape[-1], dtype=each.dtype, device=each.device) for each in outputs]
    total = sum((each * ramp).sum() for each, ramp in zip(outputs, ramps, strict=True))
    assert isinstance(total, Tensor)
    return [*(each.detach() for each in outputs), *torch.autograd.grad(total, inputs)]


def _converted(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Floating tensors converted, cut from any graph; masks and lengths copied; plain values as they are."""
    if not isinstance(value, Tensor):
        return value
    return convert(value.detach()) if value.is_floating_point() else value.clone()


def _attention(spec: AttentionSpec) -> Iterator[Case]:
    for length in (LENGTH, LONG):
        if spec.one_query:
            s_q, s_k = 1, 1 if spec.square else length
        elif spec.square:
            s_q = s_k = length
        elif spec.more_queries:
            s_q, s_k = length, length - 8
        else:
            s_q, s_k = 5 if spec.few_queries else length - 8, length
        draw = _Draw(spec.dtype, spec.device)
        # queries as a projection leaves them, keys and values as a cache holds them
        query = draw(2, s_q, spec.heads, spec.head_dim).transpose(1, 2)
        key, value = draw(2, spec.kv_heads, s_k, spec.head_dim), draw(2, spec.kv_heads, s_k, spec.value_dim)
        mask = None
        if spec.mask is not None:
            mask = torch.ones(2, 1, s_q, s_k, dtype=torch.bool, device=spec.device)
            mask[1, :, :, :3] = False
            if spec.mask != torch.bool:
                mask = torch.zeros(mask.shape, dtype=spec.mask, device=spec.device).masked_fill(~mask, -torch.inf)
        yield Case(
            (query, key, value),
            keywords={
                "scale": spec.head_dim**-0.5,
                "causal": spec.causal,
                "mask": mask,
                "window": spec.window,
                "softcap": 2.0 if spec.softcap else None,
                "sinks": draw(spec.heads) if spec.sinks else None,
            },
        )


def _varlen(spec: VarlenSpec) -> Iterator[Case]:
    """Sequences of several lengths, one of them with a single query."""
    queries, keys = (LENGTH, 1, LONG), (LENGTH, LENGTH - 2, LONG + 3)
    draw = _Draw(spec.dtype, spec.device)
    ends = [
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=spec.device) for lengths in (queries, keys)
    ]
    yield Case(
        (
            draw(sum(queries), spec.heads, spec.head_dim),
            draw(sum(keys), spec.kv_heads, spec.head_dim),
            draw(sum(keys), spec.kv_heads, spec.value_dim),
            *ends,
        ),
        keywords={
            "longest_query": max(queries),
            "longest_key": max(keys),
            "scale": spec.head_dim**-0.5,
            "causal": spec.causal,
            "window": spec.window,
            "softcap": 2.0 if spec.softcap else None,
        },
    )


def _decode(spec: DecodeSpec) -> Iterator[Case]:
    """Rows of several lengths; what lies outside them is large, so that one key too many shows."""
    draw = _Draw(spec.dtype, spec.device)
    s_q = 1 if spec.one_query else 5 if spec.few_queries else LENGTH
    lengths, starts = (s_q, LENGTH, LONG - 1), (0, 3, LONG - 1 - s_q)
    key = draw(3, spec.kv_heads, LONG, spec.head_dim)
    value = draw(3, spec.kv_heads, LONG, spec.value_dim)
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        value[row, :, length:] = 1000.0
        value[row, :, : start if spec.starts else 0] = 1000.0
    yield Case(
        (
            draw(3, s_q, spec.heads, spec.head_dim).transpose(1, 2),
            key,
            value,
            torch.tensor(lengths, dtype=torch.int32, device=spec.device),
        ),
        keywords={
            "scale": spec.head_dim**-0.5,
            "starts": torch.tensor(starts, dtype=torch.int32, device=spec.device) if spec.starts else None,
            "window": spec.window,
            "ends": None,
            "softcap": 2.0 if spec.softcap else None,
            "sinks": draw(spec.heads) if spec.sinks else None,
        },
    )


def _linear(spec: LinearSpec | FusedLinearSpec) -> Iterator[Case]:
    n = spec.n
    if n * spec.k > LARGEST_WEIGHT:  # keeps N's divisibility
        n = max(64, LARGEST_WEIGHT // spec.k // 64 * 64) + n % 64
    draw = _Draw(spec.dtype, spec.device)
    weight = draw(n, spec.k) * spec.k**-0.5
    bias = None if spec.bias_dtype is None else draw(n)
    for m in (1, 3, 8, 33):  # each has kernels of its own somewhere
        yield Case((draw(m, spec.k), weight, bias))


def _fused_linear(spec: FusedLinearSpec) -> Iterator[Case]:
    draw = _Draw(spec.dtype, spec.device)
    for case in _linear(spec):
        x, weight, bias = case.tensors
        assert x is not None and weight is not None
        n = weight.shape[0] if spec.activation is None else weight.shape[0] // 2
        norm = None if spec.norm_dtype is None else draw(spec.k).to(spec.norm_dtype)
        residual = draw(x.shape[0], n) if spec.residual else None
        yield Case((x, weight, bias, norm, residual), (1e-6, spec.one_plus, spec.activation))


def _shuffled_linear(spec: LinearSpec) -> Iterator[Case]:
    from hf_rocm.ops.shuffled import shuffle

    for case in _linear(spec):
        x, weight, bias = case.tensors
        assert weight is not None
        yield Case((x, shuffle(weight).data, bias))


def _quantized_linear(spec: QuantizedSpec) -> Iterator[Case]:
    """One row of each x is zero: its largest magnitude is no divisor."""
    from hf_rocm.ops.eight_bit import quantize_rows, shuffle_rows

    n = spec.n
    if n * spec.k > LARGEST_WEIGHT:  # keeps N's divisibility
        n = max(256, LARGEST_WEIGHT // spec.k // 256 * 256) + n % 256
    draw = _Draw(spec.dtype, spec.device)
    weight, scale = quantize_rows(draw(n, spec.k) * spec.k**-0.5, spec.format)
    bias = None if spec.bias_dtype is None else draw(n).to(spec.bias_dtype)
    if spec.shuffled:
        weight = shuffle_rows(weight)
    for m in (1, 33, 300):  # few rows, some, and more than the largest tile
        x = draw(m, spec.k)
        if m > 1:
            x[0] = 0
        yield Case((x, weight, scale.flatten().float(), bias), (spec.format, spec.shuffled))


def _act_and_mul(spec: ActivationSpec) -> Iterator[Case]:
    draw = _Draw(spec.dtype, spec.device)
    for m in (1, LENGTH):
        yield Case((draw(m, 2 * spec.dim) * 3,), (spec.activation, spec.interleaved, 2.0, 1.702))


def _rms_norm(spec: NormSpec) -> Iterator[Case]:
    draw = _Draw(spec.dtype, spec.device)
    for m in (1, LENGTH):
        yield Case((draw(m, spec.dim), draw(spec.dim)), (1e-6, spec.one_plus))


def _add_rms_norm(spec: NormSpec) -> Iterator[Case]:
    draw = _Draw(spec.dtype, spec.device)
    for m in (1, LENGTH):
        yield Case((draw(m, spec.dim), draw(m, spec.dim), draw(spec.dim)), (1e-6, spec.one_plus))


def _rope(spec: RopeSpec) -> Iterator[Case]:
    draw = _Draw(spec.dtype, spec.device)
    angles = draw(1 if spec.shared else 2, LENGTH, spec.rotated // 2).double()
    angles = angles.repeat_interleave(2, -1) if spec.interleaved else torch.cat((angles, angles), -1)
    query = draw(2, LENGTH, 4, spec.head_dim).transpose(1, 2)
    key = draw(2, 2, LENGTH, spec.head_dim)
    yield Case((query, key, angles.cos().to(spec.angle_dtype), angles.sin().to(spec.angle_dtype)), (spec.interleaved,))


def _rope_into_cache(spec: RopeIntoCacheSpec) -> Iterator[Case]:
    """Behind what the cache holds; the rest of it must stay as it is."""
    b, s = (1, 1) if spec.one else (2, LENGTH)
    draw = _Draw(spec.dtype, spec.device)
    angles = draw(1 if spec.shared else b, s, spec.rotated // 2).double()
    angles = angles.repeat_interleave(2, -1) if spec.interleaved else torch.cat((angles, angles), -1)
    heads = (draw(b, s, h, d).transpose(1, 2) for h, d in ((4, spec.head_dim), (2, spec.head_dim), (2, spec.value_dim)))
    before = torch.tensor(3, device=spec.device)
    yield Case(
        (
            *heads,
            angles.cos().to(spec.angle_dtype),
            angles.sin().to(spec.angle_dtype),
            draw(b, 2, LENGTH + 5, spec.head_dim),
            draw(b, 2, LENGTH + 5, spec.value_dim),
            before if spec.counted else torch.arange(s, device=spec.device) + before,
        ),
        (spec.interleaved,),
    )


def _experts(spec: ExpertsSpec) -> Iterator[Case]:
    from hf_rocm.ops.moe_torch import Form

    draw = _Draw(spec.dtype, spec.device)
    sizes = ((2 * spec.intermediate, spec.hidden), (spec.hidden, spec.intermediate))
    stacked = [draw(spec.experts, *(size[::-1] if spec.transposed else size)) * size[1] ** -0.5 for size in sizes]
    biases = [draw(spec.experts, size[0]) if spec.bias else None for size in sizes]
    form = Form(spec.activation, spec.transposed, spec.interleaved, spec.weigh_input, limit=2.0, alpha=1.702)
    for tokens in (1, LENGTH, LONG):
        scores = draw(tokens, spec.experts).float()
        scores[:, -1] = -torch.inf  # nobody's choice, where there is another
        chosen, ids = (each[:, : spec.top] for each in scores.sort(descending=True))
        weights = chosen.nan_to_num(neginf=-9.0).softmax(-1).to(spec.dtype)
        yield Case((draw(tokens, spec.hidden), *stacked, ids, weights, *biases), (form,))


def _shuffled_experts(spec: ExpertsSpec) -> Iterator[Case]:
    from hf_rocm.ops.moe_shuffled import shuffle_experts

    for case in _experts(spec):
        x, gate_up, down, *further = case.tensors
        assert gate_up is not None and down is not None
        yield Case((x, shuffle_experts(gate_up).data, shuffle_experts(down).data, *further), case.others)


class _Draw:
    """Normal numbers, the same on every machine, without touching the user's random state."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.dtype, self.device = dtype, device

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(device=self.device, dtype=self.dtype)


_CASES: dict[str, Callable[[Any], Iterator[Case]]] = {
    "attention": _attention,
    "linear": _linear,
    "fused_linear": _fused_linear,
    "shuffled_linear": _shuffled_linear,
    "quantized_linear": _quantized_linear,
    "act_and_mul": _act_and_mul,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rope": _rope,
    "rope_into_cache": _rope_into_cache,
    "varlen_attention": _varlen,
    "decode_attention": _decode,
    "experts": _experts,
    "shuffled_experts": _shuffled_experts,
}
