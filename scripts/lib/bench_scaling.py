"""Compute the tables of docs/multi-gpu.md: the communication between ranks, and the limits of scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lib import data_sheets

SHAPES = {"Llama-8B": "llama-8b", "Llama-70B": "llama-70b", "Llama-405B": "llama-405b"}
RANKS = (2, 4, 8, 16)
NODE = 8
# Bytes per second in each direction. An Infinity Fabric link of the Instinct MI300X has 16 lanes of 32 Gb/s, and
# connects two of the eight GPUs of a node. The network has one port of 400 Gb/s per GPU.
LINK, NIC = 64e9, 50e9
# Assumed seconds per all-reduce, not measured.
ASSUMED = (10e-6, 25e-6)
GPU = data_sheets.GPUS[0]


def tables() -> str:
    """Markdown: bytes per token, the allowed additional time of an all-reduce, times of decode steps and of prompts."""
    assert GPU.name == "MI300X"
    return "\n\n".join(
        [
            "Data exchanged per token at batch 1, in bf16 (*computed*):",
            exchanged(),
            "Additional time of an all-reduce, relative to one over half the GPUs, above which doubling the "
            f"number of GPUs makes a step slower ({GPU.name}, batch 1, *computed*):",
            allowed(),
            f"A decode step at batch 1 on {GPU.name}s, if an all-reduce takes {_micro(ASSUMED[0])} "
            f"or {_micro(ASSUMED[1])} (assumed, *computed*):",
            steps(),
            f"A prompt of 1024 tokens on a node of {NODE} {GPU.name}s and on two (*computed*):",
            prompts(),
        ]
    )


def exchanged() -> str:
    """All-reduces and bytes per token, and the transfer time of one all-reduce, over one link and across two nodes."""
    from hf_rocm.tools.bench import scaling

    rows = []
    for name, decoder in _decoders().items():
        exchange = scaling.exchange(decoder, NODE)
        wire = scaling.wire_seconds(exchange.message, NODE, LINK)
        across = scaling.nodes_wire_seconds(exchange.message, nodes=2, per_node=NODE, link=LINK, nic=NIC)
        rows.append(
            (
                name,
                f"{exchange.sums} × {exchange.message / 1024:.0f} KiB",
                *(f"{scaling.exchange(decoder, ranks).sent / 1e6:.2f} MB" for ranks in RANKS),
                f"{1e6 * wire:.2f} µs",
                f"{1e6 * across:.2f} µs",
            )
        )
    sent = [f"sent per rank, {ranks} GPUs" for ranks in RANKS]
    return _markdown(
        ("", "all-reduces", *sent, f"transfer time of one all-reduce, {NODE} GPUs", "across two nodes"), rows
    )


def allowed() -> str:
    """The additional time of an all-reduce above which doubling the number of ranks makes a step slower."""
    from hf_rocm.tools.bench import scaling

    rows = []
    for name, decoder in _decoders().items():
        cells = []
        for ranks in RANKS:
            half = ranks // 2
            if not _fits(decoder.weights, half):
                cells.append("needed to fit" if _fits(decoder.weights, ranks) else "does not fit")
            else:
                cells.append(_micro(scaling.allowed_seconds(decoder, half, ranks, GPU.bandwidth)))
        rows.append((name, *cells))
    return _markdown(("", *(f"{ranks // 2} → {ranks}" for ranks in RANKS)), rows)


def steps() -> str:
    """The time of a decode step in milliseconds, by number of ranks."""
    from hf_rocm.tools.bench import scaling

    rows = []
    for name, decoder in _decoders().items():
        cells = []
        for ranks in (1, *RANKS):
            read = scaling.step_seconds(decoder, ranks, GPU.bandwidth)
            sums = scaling.exchange(decoder, ranks).sums
            times = dict.fromkeys(f"{1000 * (read + sums * assumption):.2f}" for assumption in ASSUMED)
            cells.append(" / ".join(times) + " ms" if _fits(decoder.weights, ranks) else "does not fit")
        rows.append((name, *cells))
    return _markdown(("", "1 GPU", *(f"{ranks} GPUs" for ranks in RANKS)), rows)


def prompts() -> str:
    """The times of a prompt's GEMMs, and of its all-reduces over all links, over one link, and across two nodes."""
    from hf_rocm.tools.bench import scaling

    rows = []
    for name, decoder in _decoders().items():
        exchange = scaling.exchange(decoder, NODE, tokens=1024)
        flops = 1024 * 2 * (decoder.matrices - decoder.vocabulary * decoder.hidden)
        one_link = exchange.sums * scaling.wire_seconds(exchange.message, NODE, LINK)
        all_links = exchange.sums * scaling.wire_seconds(exchange.message, NODE, LINK * (NODE - 1))
        across = exchange.sums * scaling.nodes_wire_seconds(
            exchange.message, nodes=2, per_node=NODE, link=LINK * (NODE - 1), nic=NIC
        )
        rows.append(
            (
                name,
                f"{exchange.message / 2**20:.0f} MiB",
                f"{1000 * flops / NODE / GPU.bf16:.1f} ms",
                f"{1000 * all_links:.1f} ms",
                f"{1000 * one_link:.1f} ms",
                f"{1000 * flops / 2 / NODE / GPU.bf16:.1f} ms",
                f"{1000 * across:.1f} ms",
            )
        )
    header = (
        "",
        "all-reduce size",
        f"GEMMs, {NODE} GPUs",
        f"all-reduces over all {NODE - 1} links",
        "over one link",
        f"GEMMs, {2 * NODE} GPUs",
        "all-reduces across two nodes",
    )
    return _markdown(header, rows)


def _decoders() -> dict[str, Any]:
    from hf_rocm.tools.bench.known_shapes import SHAPES as KNOWN
    from hf_rocm.tools.bench.scaling import Decoder

    return {name: Decoder.of(KNOWN[shape].settings) for name, shape in SHAPES.items()}


def _fits(weights: int, ranks: int) -> bool:
    return weights / ranks < GPU.capacity


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs" if seconds >= 9.5e-6 else f"{1e6 * seconds:.1f} µs"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from hf_rocm.tools.bench.report import markdown

    return markdown(header, rows)
