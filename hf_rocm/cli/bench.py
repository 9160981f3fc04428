"""`hf-rocm bench`: stock against hf_rocm on this machine, whole models and single kernels."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_rocm.cli.output import print_json, print_notice, print_table
from hf_rocm.cli.parameters import DeviceName, Json
from hf_rocm.errors import OptionError

if TYPE_CHECKING:
    from hf_rocm.bench.cases import Case
    from hf_rocm.bench.record import Segment
    from hf_rocm.bench.run import Subject


class _ModelOrCommand(typer.core.TyperGroup):
    """`hf-rocm bench MODEL` beside `hf-rocm bench ops`: whatever isn't one of our words is a model or an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["model", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    name="bench",
    cls=_ModelOrCommand,
    no_args_is_help=True,
    subcommand_metavar="MODEL | --config NAME | COMMAND [ARGS]...",
    help="Measure stock against hf_rocm here: hf-rocm bench MODEL, or --config NAME for a known shape.",
)

ConfigName = Annotated[
    str | None, typer.Option("--config", metavar="NAME", help="A known shape with random weights: llama-8b, small, …")
]
DtypeName = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="Such as bfloat16 (default: bf16; fp32 on a CPU).")
]
Save = Annotated[Path | None, typer.Option(metavar="FILE", help="Add the result to this file of segments.")]
SegmentName = Annotated[str | None, typer.Option("--segment", metavar="NAME", help="What to call it there.")]


@bench.command("model")
def model(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A model's folder, or its hub name.")] = None,
    config: ConfigName = None,
    batch: Annotated[str, typer.Option(metavar="SIZES", help="Batch sizes, such as 1,8,32.")] = "1",
    prompt: Annotated[str, typer.Option(metavar="LENGTHS", help="Prompt lengths in tokens.")] = "1024",
    new: Annotated[int, typer.Option(metavar="TOKENS", help="New tokens for each timed generation.", min=2)] = 128,
    kinds: Annotated[
        str | None, typer.Option("--kinds", metavar="KINDS", help="decode,prefill (default: both).")
    ] = None,
    sides: Annotated[
        str | None,
        typer.Option("--sides", metavar="SIDES", help="Of stock,compile,reduce-overhead,liger,no-graphs,hf_rocm."),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Timed rounds; each side runs once a round.", min=1)] = 5,
    layers: Annotated[int | None, typer.Option(metavar="N", help="Another depth than the shape has.", min=1)] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="Share each layer among N GPUs; starts N ranks.", min=2)
    ] = None,
    dtype: DtypeName = None,
    device: DeviceName = None,
    save: Save = None,
    segment: SegmentName = None,
    chart: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: FILE.svg, FILE.png or both.")] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also list kernels and gaps, and write a trace here.")
    ] = None,
    json: Json = False,
) -> None:
    """Time MODEL, or a known shape, in decoding and prefill: stock, stock compiled, and hf_rocm, in turns.

    Every side's numbers are checked first, and wrong ones are not timed. Times stand beside the floor that this
    machine's own copy bandwidth and matmul rate put under them. Without ROCm hf_rocm's path is forced, and the
    result says so. With --tp, transformers shards the model over N ranks on both sides, stock and hf_rocm, and what
    they exchange is listed too.
    """
    from hf_rocm.bench import record
    from hf_rocm.bench.cases import Case, grid

    subject = _subject(model, config, device, dtype, layers)
    _check_files(save, chart)
    if tp is not None and profile is not None:
        raise typer.BadParameter("--profile is for one device: leave --tp out")
    names = _sides(sides, encoder=subject.encoder) if tp is None else _shared_sides(sides)
    batches, prompts = _numbers(batch, "--batch"), _numbers(prompt, "--prompt")
    if subject.encoder:
        lengths = prompts if _eats_tokens(subject) else [0]
        cases = [Case("encode", size, length) for length in lengths for size in batches]
    else:
        cases = grid(_kinds(kinds), batches, prompts, new=new)
    with _Progress() as progress:
        done = _measure(subject, cases, names, tp, rounds=rounds, segment=segment, progress=progress)
    if save is not None:
        record.save(save, done)
    if json:
        print_json(done.to_dict())
    else:
        _print(done)
    if chart is not None:
        _draw(done, chart)
    if profile is not None:
        _profile(subject, cases[0], profile)


def _subject(
    model: str | None, config: str | None, device: str | None, dtype: str | None, layers: int | None
) -> Subject:
    import torch

    from hf_rocm.bench import shapes
    from hf_rocm.bench.run import Subject
    from hf_rocm.diagnostics.load import device_named

    if (model is None) == (config is None):
        raise typer.BadParameter("give a MODEL, or a known shape with --config")
    if config is not None:
        shapes.shape(config)
    if layers is not None and config is None:
        raise typer.BadParameter("--layers goes with --config")
    kind = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and kind not in (torch.bfloat16, torch.float16, torch.float32):
        raise OptionError(f"--dtype {dtype} is not understood", facts={"allowed": "bfloat16, float16, float32"})
    return Subject(model, config, device_named(device), kind, layers)


def _sides(text: str | None, *, encoder: bool) -> list[str]:
    from hf_rocm.bench.sides import DEFAULT, LABELS

    names = [each.strip() for each in text.split(",")] if text is not None else list(DEFAULT)
    unknown = [each for each in names if each not in LABELS]
    if unknown:
        raise OptionError(f"--sides {text} is not understood at {unknown[0]!r}", facts={"known": ", ".join(LABELS)})
    return list(dict.fromkeys(names))


def _shared_sides(text: str | None) -> list[str]:
    from hf_rocm.bench.sides import OURS, STOCK

    return [STOCK, OURS] if text is None else _sides(text, encoder=False)


def _measure(
    subject: Subject, cases: list[Case], names: list[str], tp: int | None, *, segment: str | None, **how: Any
) -> Segment:
    """On one device, or over several ranks."""
    if tp is None:
        from hf_rocm.bench.run import bench as measure

        return measure(subject, cases, names, segment=segment or subject.name, **how)
    from hf_rocm.bench.ranks import bench_ranks

    return bench_ranks(subject, cases, names, ranks=tp, segment=segment or f"{subject.name}, tp {tp}", **how)


def _kinds(text: str | None) -> list[str]:
    names = ["decode", "prefill"] if text is None else [each.strip() for each in text.split(",")]
    if not set(names) <= {"decode", "prefill"}:
        raise OptionError(f"--kinds {text} is not understood", facts={"allowed": "decode, prefill"})
    return names


def _eats_tokens(subject: Subject) -> bool:
    from hf_rocm.bench.shapes import shape

    return subject.shape is None or shape(subject.shape).inputs == "tokens"


def _numbers(text: str, option: str) -> list[int]:
    numbers = [each.strip() for each in text.split(",")]
    if not all(each.isascii() and each.isdecimal() and 0 < int(each) <= 10**7 for each in numbers):
        raise OptionError(f"{option} {text} is not understood", hint=f"write whole numbers: {option} 1,8,32")
    return sorted({int(each) for each in numbers})


class _Progress:
    """What is being done, on stderr: redrawn on a terminal, elsewhere a line now and then."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last = -60.0

    def __enter__(self) -> _Progress:
        return self

    def __call__(self, text: str) -> None:
        if self._live:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last > 15:
            self._last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def __exit__(self, *exception: object) -> None:
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _print(segment: Segment) -> None:
    from hf_rocm.bench import report

    for line in report.heading(segment):
        print(line)
    for result in segment.results:
        print(f"\n{report.title(result)}")
        if result.timings:
            print_table(report.header(result), report.rows(result))
        found = report.gains(result)
        if len(found) > 1:
            gained = ", ".join(
                f"{value:.2f} × as fast as {what}" for what, value in found.items() if what != "the floor"
            )
            print(f"hf_rocm: {gained}")
        for line in [*report.exchange(segment, result), *report.notes(result)]:
            print(line)
        for line in report.reasons(result, segment.missing):
            print_notice(f"left out: {line}")


def _check_files(save: Path | None, chart: Path | None) -> None:
    """Refuse now what would be refused after minutes of measuring."""
    from hf_rocm.bench import chart as charts
    from hf_rocm.bench import record

    if save is not None:
        record.load(save)
    if chart is not None:
        charts.check(chart)


def _draw(segment: Segment, file: Path) -> None:
    from hf_rocm.bench import chart as charts

    for written in charts.save([segment], file):
        print_notice(f"drawn: {written}")


def _profile(subject: Subject, case: Case, trace: Path) -> None:
    from hf_rocm.bench.profile import profile

    with _Progress() as progress:
        found = profile(subject, case, trace, progress=progress)
    print(f"\n{found.title}")
    print_table(("kernel", "calls a step", "µs a step", "share"), found.rows())
    for line in found.lines():
        print(line)
    print_notice(f"trace: {trace} (chrome://tracing, perfetto)")


@bench.command("ops")
def ops(
    config: Annotated[str, typer.Option(metavar="NAME", help="The decoder whose shapes are meant.")] = "llama-8b",
    op: Annotated[str | None, typer.Option(metavar="NAMES", help="Such as linear,rope (default: all).")] = None,
    rows: Annotated[str, typer.Option(metavar="SIZES", help="Rows of the products and norms.")] = "1,8,32,1024",
    batch: Annotated[str, typer.Option(metavar="SIZES", help="Batch sizes of attention.")] = "1,8",
    keys: Annotated[str, typer.Option(metavar="LENGTHS", help="Cache lengths of decode attention.")] = "1024,32768",
    prompt: Annotated[int, typer.Option(metavar="TOKENS", help="Length of prefill attention.", min=1)] = 1024,
    dtype: DtypeName = None,
    device: DeviceName = None,
    save: Save = None,
    segment: SegmentName = None,
    refused: Annotated[bool, typer.Option("--refused", help="Also list what could not be timed, and why.")] = False,
    json: Json = False,
) -> None:
    """Compare every implementation of each operation that this machine has, at the shapes of a decoder.

    Each is checked against fp64 first. Times are the device's alone (recorded in a graph where that can be), beside
    the floor of what was copied and multiplied per second here.
    """
    from hf_rocm.bench import record
    from hf_rocm.bench.ops_run import compare_ops

    subject = _subject(None, config, device, dtype, None)
    _check_files(save, None)
    with _Progress() as progress:
        done = compare_ops(
            subject,
            _operations(op),
            rows=_numbers(rows, "--rows"),
            batches=_numbers(batch, "--batch"),
            keys=_numbers(keys, "--keys"),
            prompt=prompt,
            segment=segment or f"ops {subject.name}",
            progress=progress,
        )
    if save is not None:
        record.save(save, done)
    if json:
        print_json(done.to_dict())
    else:
        _print_ops(done, refused=refused)


def _operations(text: str | None) -> list[str]:
    from hf_rocm.bench.ops_cases import OPERATIONS, ROUTING

    known = (*OPERATIONS, ROUTING)
    names = list(known) if text is None else [each.strip() for each in text.split(",")]
    if not set(names) <= set(known):
        raise OptionError(f"--op {text} is not understood", facts={"known": ", ".join(known)})
    return names


def _print_ops(segment: Segment, *, refused: bool) -> None:
    from hf_rocm.bench import report

    for line in report.heading(segment):
        print(line)
    for (operation, case), lines in report.kernels_by_case(segment).items():
        floor = f", floor {lines[0]['floor']:.1f} µs ({lines[0]['bound']})" if lines[0]["floor"] else ""
        print(f"\n{operation}: {case}{floor}")
        timed = [each for each in lines if each["microseconds"] is not None]
        if timed:
            print_table(("implementation", "µs", "× floor", "of the rate"), [report.kernel_row(each) for each in timed])
        for each in lines:
            if refused and each["reason"] is not None:
                print_notice(f"{each['implementation']}: {each['reason']}")
