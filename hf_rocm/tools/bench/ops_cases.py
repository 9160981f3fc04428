"""The calls that `hf-rocm bench ops` times: `OPERATIONS` at the shapes of a model, with their bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_rocm import ops
from hf_rocm.ops.linear import FEW
from hf_rocm.tools.bench.known_shapes import SHAPES, Shape

OPERATIONS = (
    "linear",
    "fused_linear",
    "attention",
    "decode_attention",
    "rms_norm",
    "add_rms_norm",
    "add_layer_norm",
    "act_and_mul",
    "rope",
    "experts",
)
# The numbers of tokens per decode step for which experts are measured.
TOKENS = (1, 4, 8)
# The model whose experts are measured if the shape has no `moe_intermediate_size`.
MOE = "qwen3-30b-a3b"
# Selects a measurement of the overhead of routing calls to implementations, not an operation.
ROUTING = "routing"


@dataclass(frozen=True)
class OpCase:
    """One call.

    inputs: creates a set of tensors with a generator; the first has the requested dtype. call: takes the tensors of
    such a set. bytes, flops: estimates for one call.
    """

    operation: str
    title: str
    inputs: Callable[[torch.Generator], tuple[Tensor, ...]]
    call: Callable[..., Any]
    bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """The requested sizes.

    rows: numbers of rows for GEMMs (M) and for row-wise operations. batches: batch sizes for both kinds of attention.
    keys: cache lengths for decode attention. prompt: the sequence length for attention.
    """

    rows: Sequence[int]
    batches: Sequence[int]
    keys: Sequence[int]
    prompt: int
    device: torch.device
    dtype: torch.dtype

    @property
    def item(self) -> int:
        return self.dtype.itemsize

    def draw(self, generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=self.device, dtype=self.dtype) * scale


def cases(names: Sequence[str], shape: Shape, sizes: Sizes) -> Iterator[OpCase]:
    """Yield every case of these operations at a decoder's shape."""
    for name in names:
        yield from _CASES[name](_Dims(shape), sizes)


class _Dims:
    def __init__(self, shape: Shape) -> None:
        settings = shape.settings
        self.hidden: int = settings["hidden_size"]
        self.intermediate: int = settings["intermediate_size"]
        self.heads: int = settings["num_attention_heads"]
        self.kv_heads: int = settings.get("num_key_value_heads", self.heads)
        self.head_dim: int = settings.get("head_dim", self.hidden // self.heads)
        self.vocabulary: int = settings["vocab_size"]
        self.moe = settings if "moe_intermediate_size" in settings else SHAPES[MOE].settings


def _linear(dims: _Dims, sizes: Sizes) -> Iterator[OpCase]:
    width = dims.heads * dims.head_dim
    gemms = {
        "qkv": (width + 2 * dims.kv_heads * dims.head_dim, dims.hidden),
        "o": (dims.hidden, width),
        "gate/up": (2 * dims.intermediate, dims.hidden),
        "down": (dims.hidden, dims.intermediate),
        "head": (dims.vocabulary, dims.hidden),
    }
    for rows in sizes.rows:
        for name, (n, k) in gemms.items():
            if name == "head" and rows > 64:
                # For a prompt, the head runs only on the last position.
                continue

            def inputs(generator: torch.Generator, m: int = rows, n: int = n, k: int = k) -> tuple[Tensor, ...]:
                return sizes.draw(generator, m, k), sizes.draw(generator, n, k, scale=k**-0.5)

            moved = sizes.item * (n * k + rows * (n + k))
            yield OpCase("linear", f"{name}, M {rows}, N {n}, K {k}", inputs, ops.linear, moved, 2.0 * rows * n * k)


def _fused_linear(dims: _Dims, sizes: Sizes) -> Iterator[OpCase]:
    """Yield a layer's four GEMMs with fused prologues and epilogues, for at most FEW rows."""
    width = dims.heads * dims.head_dim
    gemms = {
        "norm, qkv": (width + 2 * dims.kv_heads * dims.head_dim, dims.hidden, True, False),
        "o, + residual": (dims.hidden, width, False, False),
        "norm, gate/up, gate": (2 * dims.intermediate, dims.hidden, True, True),
        "down, + residual": (dims.hidden, dims.intermediate, False, False),
    }
    for rows in (row for row in sizes.rows if row <= FEW):
        for name, (n, k, normed, gated) in gemms.items():

            def inputs(
                generator: torch.Generator, m: int = rows, n: int = n, k: int = k, normed: bool = normed
            ) -> tuple[Tensor, ...]:
                further = sizes.draw(generator, k) if normed else sizes.draw(generator, m, n)
                return sizes.draw(generator, m, k), sizes.draw(generator, n, k, scale=k**-0.5), further

            def call(x: Tensor, weight: Tensor, further: Tensor, normed: bool = normed, gated: bool = gated) -> Tensor:
                if not normed:
                    return ops.fused_linear(x, weight, residual=further)
                activation = "silu" if gated else None
                return ops.fused_linear(x, weight, norm=ops.Norm(further, 1e-5), activation=activation)

            columns, further_numbers = (n // 2 if gated else n), (k if normed else rows * n)
            moved = sizes.item * (n * k + rows * (k + columns) + further_numbers)
            yield OpCase("fused_linear", f"{name}, M {rows}, N {n}, K {k}", inputs, call, moved, 2.0 * rows * n * k)


def _attention(dims: _Dims, sizes: Sizes) -> Iterator[OpCase]:
    h, hkv, d, s = dims.heads, dims.kv_heads, dims.head_dim, sizes.prompt

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.attention(query, key, value, scale=d**-0.5, causal=True)[0]

    for b in sizes.batches:

        def inputs(generator: torch.Generator, b: int = b) -> tuple[Tensor, ...]:
            query = sizes.draw(generator, b, s, h, d).transpose(1, 2)
            return query, sizes.draw(generator, b, hkv, s, d), sizes.draw(generator, b, hkv, s, d)

        moved = sizes.item * b * s * d * (2 * h + 2 * hkv)
        yield OpCase("attention", f"causal, batch {b}, {s} tokens", inputs, call, moved, 2.0 * b * h * d * s * (s + 1))


def _decode(dims: _Dims, sizes: Sizes) -> Iterator[OpCase]:
    h, hkv, d = dims.heads, dims.kv_heads, dims.head_dim

    def call(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        return ops.decode_attention(query, key, value, lengths, scale=d**-0.5)

    for keys in sizes.keys:
        for b in sizes.batches:

            def inputs(generator: torch.Generator, b: int = b, keys: int = keys) -> tuple[Tensor, ...]:
                query = sizes.draw(generator, b, 1, h, d).transpose(1, 2)
                lengths = torch.full((b,), keys, dtype=torch.int32, device=sizes.device)
                return query, sizes.draw(generator, b, hkv, keys, d), sizes.draw(generator, b, hkv, keys, d), lengths

            moved = sizes.item * b * d * (2 * hkv * keys + 2 * h)
            flops = 4.0 * b * h * d * keys
            yield OpCase("decode_attention", f"batch {b}, {keys} keys", inputs, call, moved, flops)


def _rms_norm(dims: _Dims, sizes: Sizes) -> Iterator[OpCase]:
    for m, width in _elementwise(dims, sizes):

        def inputs(generator: torch.Generator, m: int = m, width: int = width) -> tuple[Tensor, ...]:
            return sizes.draw(generator, m, width), sizes.draw(generator, width)

        def call(x: Tensor, weight: Tensor) -> Tensor:
            return ops.rms_norm(x, weight, eps=1e-5)

        yield OpCase("rms_norm", f"{m} × {width}", inputs, call, sizes.item * (2 * m + 1) * width)


def _add_rms_norm(dims: _Dims, sizes: Sizes) -> Iterator[OpCase]:
    for m, width in _elementwise(dims, sizes):

        def inputs(generator: torch.Generator, m: int = m, width: int = width) -> tuple[Tensor, ...]:
            return sizes.draw(generator, m, width), sizes.draw(generator, m, width), sizes.draw(generator, width)

        def call(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return ops.add_rms_norm(x, residual, weight, eps=1e-5)

        yield OpCase("add_rms_norm", f"{m} × {width}", inputs, call, sizes.item * (4 * m + 1) * width)


def _add_layer_norm(dims: _Dims, sizes: Sizes) -> Iterator[OpCase]:
    for m, width in _elementwise(dims, sizes):

        def inputs(generator: torch.Generator, m: int = m, width: int = width) -> tuple[Tensor, ...]:
            rows = sizes.draw(generator, m, width), sizes.draw(generator, m, width)
            return *rows, sizes.draw(generator, width), sizes.draw(generator, width)

        def call(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return ops.add_layer_norm(x, residual, weight, bias, eps=1e-5)[0]

        yield OpCase("add_layer_norm", f"{m} × {width}", inputs, call, sizes.item * (3 * m + 2) * width)


def _act_and_mul(dims: _Dims, sizes: Sizes) -> Iterator[OpCase]:
    for m, width in _elementwise(dims, sizes, wide=dims.intermediate):

        def inputs(generator: torch.Generator, m: int = m, width: int = width) -> tuple[Tensor, ...]:
            return (sizes.draw(generator, m, 2 * width),)

        def call(x: Tensor) -> Tensor:
            return ops.act_and_mul(x, activation="silu")

        yield OpCase("act_and_mul", f"{m} × {width}", inputs, call, sizes.item * 3 * m * width)


def _rope(dims: _Dims, sizes: Sizes) -> Iterator[OpCase]:
    d = dims.head_dim
    for m, width in _elementwise(dims, sizes):
        h = width // d
        hkv = max(1, h * dims.kv_heads // dims.heads)

        def inputs(generator: torch.Generator, m: int = m, h: int = h, hkv: int = hkv) -> tuple[Tensor, ...]:
            angles = torch.rand(1, m, d // 2, generator=generator, device=sizes.device).repeat(1, 1, 2) * 6.28
            query = sizes.draw(generator, 1, m, h, d).transpose(1, 2)
            key = sizes.draw(generator, 1, m, hkv, d).transpose(1, 2)
            return query, key, angles.cos().to(sizes.dtype), angles.sin().to(sizes.dtype)

        moved = sizes.item * m * d * (2 * h + 2 * hkv + 2)
        yield OpCase("rope", f"{m} tokens, {h} + {hkv} heads of {d}", inputs, ops.rope, moved)


def _experts(dims: _Dims, sizes: Sizes) -> Iterator[OpCase]:
    """Yield the cases of routed experts. The experts of every token are random, and the same in all sets of inputs."""
    moe = dims.moe
    h, i, k = moe["hidden_size"], moe["moe_intermediate_size"], moe["num_experts_per_tok"]
    # All experts would take too long on a CPU.
    e = moe["num_experts"] if sizes.device.type == "cuda" else k

    def call(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return ops.experts(x, gate_up, down, ids, weights)

    for tokens in TOKENS:
        chosen = torch.rand(tokens, e, generator=torch.Generator().manual_seed(tokens)).argsort(-1)[:, :k]

        def inputs(generator: torch.Generator, tokens: int = tokens, chosen: Tensor = chosen) -> tuple[Tensor, ...]:
            return (
                sizes.draw(generator, tokens, h),
                sizes.draw(generator, e, 2 * i, h, scale=h**-0.5),
                sizes.draw(generator, e, h, i, scale=i**-0.5),
                chosen.to(sizes.device),
                torch.rand(tokens, k, generator=generator, device=sizes.device),
            )

        distinct = len(chosen.unique())
        title = (
            f"{tokens} {'token' if tokens == 1 else 'tokens'}, {k} of {e} experts each, {distinct} in all, {h} × {i}"
        )
        moved = sizes.item * (3 * distinct * h * i + 2 * tokens * h)
        yield OpCase("experts", title, inputs, call, moved, 6.0 * tokens * k * h * i)


# A size at which only memory bandwidth limits a kernel.
LARGE = (4096, 8192)


def _elementwise(dims: _Dims, sizes: Sizes, *, wide: int | None = None) -> list[tuple[int, int]]:
    """Return (rows, width) for each number of rows and, on a GPU, one large size. wide: overrides the model's width."""
    large = [LARGE] if sizes.device.type == "cuda" else []
    return [*((rows, wide or dims.hidden) for rows in sizes.rows), *large]


_CASES: dict[str, Callable[[_Dims, Sizes], Iterator[OpCase]]] = {
    "linear": _linear,
    "fused_linear": _fused_linear,
    "attention": _attention,
    "decode_attention": _decode,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "add_layer_norm": _add_layer_norm,
    "act_and_mul": _act_and_mul,
    "rope": _rope,
    "experts": _experts,
}
