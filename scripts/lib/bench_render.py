"""Generate the tables of docs/performance.md and docs/multi-gpu.md, and the charts of the former and of the README."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lib import bench_scaling, data_sheets

PAGE = Path("docs/performance.md")
SCALING = Path("docs/multi-gpu.md")
RECORDS = Path("docs/performance")
CHART = "decode"
# Only the first panel of CHART.
README_CHART = "decode-1"

COLUMNS = {
    "stock": "stock",
    "liger": "Liger-Kernel",
    "compile": "compile",
    "reduce-overhead": "compile, reduce-overhead",
    "no-graphs": "hf_rocm without graphs",
    "hf_rocm": "**hf_rocm**",
}

ALONE = "recorded step alone, × roofline"

# Heading → the segments whose cases are listed under it.
TABLES = {
    "Decoding, Llama-3.1-8B shape": ("decode-1", "decode-8", "decode-32"),
    "Long contexts": ("context-16k", "context-32k", "context-64k", "context-64k-8"),
    "Prefill": ("prefill",),
    "Other shapes": ("qwen3-8b", "gemma2-9b", "mistral-7b", "qwen3-30b-a3b"),
    "Encoders": ("bert-base", "siglip", "vit-b"),
    "Tensor parallel, 16 layers of the Llama-3.3-70B shape": ("tp-2", "tp-4"),
    "Tensor parallel, 8 layers of the same in fp32": ("tp-2-fp32",),
}


def render(root: Path) -> list[Path]:
    """Write the pages and the charts. Returns the files."""
    from hf_rocm.files import write
    from hf_rocm.tools.bench import chart, record

    files = sorted((root / RECORDS).glob("*.json"))
    parts: list[str] = []
    written: list[Path] = []
    for file in files:
        segments = {segment.name: segment for segment in record.load(file)}
        drawn = [segments[name] for name in TABLES["Decoding, Llama-3.1-8B shape"] if name in segments]
        if drawn and not written:
            title = f"Llama-3.1-8B shape, decoding on one {drawn[0].machine['device']}"
            written += chart.save(drawn, root / RECORDS / CHART, title=title)
            written += chart.save(drawn[:1], root / RECORDS / f"{README_CHART}.svg", title=title)
            parts.append(f"![{title}](performance/{CHART}.svg)")
        parts.append(machine(segments))
    page = root / PAGE
    text = page.read_text(encoding="utf-8")
    text = replaced(text, "measured", "\n\n".join(parts) or "Nothing has been recorded yet.")
    text = replaced(text, "computed", data_sheets.table())
    write(page, text)
    scaling = root / SCALING
    if scaling.exists():
        write(scaling, replaced(scaling.read_text(encoding="utf-8"), "computed", bench_scaling.tables()))
        written.append(scaling)
    return [page, *written]


def replaced(text: str, name: str, body: str) -> str:
    """Replace the text between the two markers of that name in the page."""
    pattern = rf"(<!-- {name}: begin [^>]*-->\n).*?(<!-- {name}: end -->)"
    result, count = re.subn(pattern, lambda match: str(match[1]) + body + "\n" + str(match[2]), text, flags=re.DOTALL)
    assert count == 1, name
    return result


def machine(segments: dict[str, Any]) -> str:
    """All tables of one machine."""
    first = next(iter(segments.values()))
    facts: dict[str, str] = dict(first.machine)
    commits = sorted({segment.commit for segment in segments.values() if segment.commit})
    lines = [
        f"## Measured on one {facts.pop('device')}",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items())
        + (f"; commit {', '.join(map(str, commits))}" if commits else "")
        + ("" if "ROCm" in facts else ". **Forced: not an AMD GPU.**"),
    ]
    for heading, names in TABLES.items():
        chosen = [segments[name] for name in names if name in segments]
        if chosen:
            lines += ["", f"### {heading}", "", *times(chosen)]
    if "start" in segments:
        lines += ["", "### Startup and memory", "", *starts(segments["start"])]
    if "kernels" in segments:
        lines += ["", "### Single operations", "", *kernels(segments["kernels"])]
    return "\n".join(lines)


def times(segments: Sequence[Any]) -> Iterator[str]:
    """Yield a table with one row per case and one column per side (medians in milliseconds), and the notes below it."""
    from hf_rocm.tools.bench.report import gains, large, markdown, milliseconds
    from hf_rocm.tools.bench.variants import EARLIER_NOT_DECODING, NOT_DECODING

    results = [(segment, result) for segment in segments for result in segment.results]
    sides = [side for side in COLUMNS if any(timing.side == side for _, result in results for timing in result.timings)]
    ratios = ["× roofline", "× stock", *(["× compiled"] if {"compile", "reduce-overhead"} & set(sides) else [])]
    if any(timing.replay for _, result in results for timing in result.timings):
        ratios.append(ALONE)
    several = len({segment.model["name"] for segment in segments}) > 1
    rows = []
    for segment, result in results:
        medians = {timing.side: milliseconds(timing.unit.median) for timing in result.timings}
        gained, least = gains(result), result.floor.milliseconds
        row = {
            "× roofline": f"{1 / gained['the roofline']:.2f}" if "the roofline" in gained else "",
            "× stock": f"{gained['stock']:.2f}" if "stock" in gained else "",
            ALONE: next((f"{timing.replay / least:.2f}" for timing in result.timings if timing.replay), ""),
            "× compiled": f"{gained['stock with torch.compile']:.2f}" if "stock with torch.compile" in gained else "",
        }
        name = f"{segment.model['name']}: {result.case.title}" if several else result.case.title
        name = f"{segment.parallel['tp']} GPUs: {name}" if segment.parallel else name
        rows.append(
            (
                name,
                milliseconds(result.floor.milliseconds),
                *(
                    f"**{medians[side]}**" if side == "hf_rocm" else medians.get(side, "")
                    for side in sides
                    if side in medians or side != "hf_rocm"
                ),
                *(row[ratio] for ratio in ratios),
            )
        )
    rounds = _from_to([segment.rounds for segment in segments], str)
    copy_rates = _from_to([segment.rates.copy for segment in segments], lambda rate: f"{large(rate)}B/s")
    matmul_rates = _from_to([segment.rates.matmul for segment in segments], lambda rate: f"{large(rate)}FLOP/s")
    yield markdown(("", "roofline", *(COLUMNS[side] for side in sides), *ratios), rows)
    yield ""
    yield (
        f"{_unit([result.case for _, result in results])}, "
        f"{'one round' if rounds == '1' else f'medians of {rounds} interleaved rounds'}. "
        f"Measured in the same run: a copy bandwidth of {copy_rates} and a matmul throughput of {matmul_rates}."
    )
    for segment in segments:
        if segment.parallel:
            yield from shared(segment)
    left_out = [
        f"- {result.case.title}: {side} was left out: {reason}."
        for segment, result in results
        for side, reason in {**segment.missing, **result.left_out}.items()
        if reason not in (NOT_DECODING, *EARLIER_NOT_DECODING)
    ]
    yield from ["", *left_out] if left_out else []


def _unit(cases: Sequence[Any]) -> str:
    """The unit of a table's times."""
    decoding = {case.kind == "decode" for case in cases}
    if decoding == {True}:
        return "Milliseconds per token"
    return "Milliseconds per token (decode) or per prompt (prefill)" if True in decoding else "Milliseconds"


def _from_to(values: Sequence[Any], shown: Callable[[Any], str]) -> str:
    """The value, if all are equal; otherwise the smallest and the largest."""
    low, high = shown(min(values)), shown(max(values))
    return low if low == high else f"{low} to {high}"


def shared(segment: Any) -> Iterator[str]:
    """Yield the notes below a table for several GPUs: interconnect, versions, comparison of tokens, all-reduces."""
    from hf_rocm.tools.bench.report import exchange, notes, parallel

    versions = ", ".join(f"{name} {segment.machine[name]}" for name in ("hf_rocm", "torch", "transformers"))
    yield ""
    placement = parallel(segment)[0]
    commit = f"; commit {segment.commit}" if segment.commit else ""
    yield f"{placement[0].upper()}{placement[1:]}; {versions}{commit}."
    yield ""
    for result in segment.results:
        for line in [*notes(result), *exchange(segment, result)]:
            yield f"- {result.case.title}: {line}."


def starts(segment: Any) -> Iterator[str]:
    """Yield a table of fresh processes: the extra time of the first generation, and peak memory."""
    from hf_rocm.tools.bench.report import markdown

    rows = []
    for side in dict.fromkeys(start["side"] for start in segment.starts):
        cold, cached = (
            next(start for start in segment.starts if start["side"] == side and start["caches"] == caches)
            for caches in ("cold", "cached")
        )
        memory = (
            ("", "") if cached["peak"] is None else (f"{cached['peak'] / 1e9:.2f}", f"{cached['reserved'] / 1e9:.2f}")
        )
        rows.append((COLUMNS[side], f"{cold['warmup']:.1f}", f"{cached['warmup']:.1f}", *memory))
    weights, cache = segment.starts[0]["weights"], segment.starts[0]["static_cache"]
    yield markdown(("", "warm-up cold, s", "warm-up, kernels cached, s", "peak GB", "reserved GB"), rows)
    yield ""
    yield (
        "Warm-up: the time of the first `generate` of a fresh process (prompt 1024, batch 1) minus that of the third. "
        f"Weights {weights / 1e9:.2f} GB; a static cache of this call is {cache / 1e9:.2f} GB."
    )


def kernels(segment: Any) -> Iterator[str]:
    """Yield a table of the fastest implementations, by operation, case and tier, and the routing overhead."""
    from hf_rocm.tools.bench.report import kernels_by_case, markdown

    rows = []
    routed = [kernel for kernel in segment.kernels if kernel["operation"] == "routing"]
    for (operation, case), lines in kernels_by_case(segment).items():
        if operation == "routing":
            continue
        timed = [line for line in lines if line["microseconds"] is not None]
        best = {
            tier: next((line for line in timed if line["implementation"].startswith(tier)), None) for tier in _TIERS
        }
        rows.append(
            (
                f"{operation}: {case}",
                f"{lines[0]['floor']:.1f}",
                *(f"{value['microseconds']:.1f}" if value else "" for value in best.values()),
                f"{timed[0]['implementation']}, {100 * timed[0]['share']:.0f} %" if timed else "",
            )
        )
    yield markdown(("", "roofline, µs", *_TIERS, "fastest, share of the roofline's rate"), rows)
    yield ""
    yield "µs on the device, the fastest implementation of each tier."
    if routed:
        added = ", ".join(f"{line['case']} {line['microseconds']:.2f}" for line in routed)
        yield f"Routing overhead per eager call, µs on the host: {added}."


_TIERS = ("aiter", "triton", "torch")
