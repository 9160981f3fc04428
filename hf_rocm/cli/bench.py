"""`hf-rocm bench`: compare whole models, single kernels and servers, stock and with hf_rocm, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_rocm.arguments import did_you_mean
from hf_rocm.cli.bench_serve import serve
from hf_rocm.cli.bench_shared import check_files, draw, subject_of
from hf_rocm.cli.groups import ModelOrCommand, numbers
from hf_rocm.cli.help_text import Command
from hf_rocm.cli.output import print_json, print_notice, print_table, print_wrapped
from hf_rocm.cli.parameters import (
    ChartFile,
    ConfigName,
    DeviceName,
    DtypeName,
    Json,
    Layers,
    OptionalModelPath,
    Save,
    SegmentName,
)
from hf_rocm.cli.progress import Progress
from hf_rocm.errors import OptionError
from hf_rocm.tools.bench.known_shapes import SHAPES

if TYPE_CHECKING:
    from hf_rocm.tools.bench.cases import Case
    from hf_rocm.tools.bench.record import Segment
    from hf_rocm.tools.bench.run import Subject


bench = typer.Typer(
    name="bench",
    cls=ModelOrCommand,
    no_args_is_help=True,
    subcommand_metavar="(MODEL | --config NAME | COMMAND) [OPTIONS]",
    help="Measure a model against stock transformers, or individual kernels against each other.",
)

_PROMPT, _PROMPT_CPU = "1024", "128"
_NEW, _NEW_CPU = 128, 32


@bench.command("model", cls=Command)
def model(
    model: OptionalModelPath = None,
    config: ConfigName = None,
    batch: Annotated[str, typer.Option(metavar="SIZES", help="Batch sizes, such as 1,8,32.")] = "1",
    prompt: Annotated[
        str | None,
        typer.Option(metavar="LENGTHS", help=f"Prompt lengths in tokens (default: {_PROMPT}, on a CPU {_PROMPT_CPU})."),
    ] = None,
    new: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help=f"New tokens per timed generation (default: {_NEW}, on a CPU {_NEW_CPU}).",
            min=2,
        ),
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option("--kinds", metavar="KINDS", help="decode, prefill, or both separated by a comma (default: both)."),
    ] = None,
    sides: Annotated[
        str | None,
        typer.Option(
            "--sides",
            metavar="SIDES",
            help="The sides to compare, separated by commas: stock, compile, reduce-overhead, liger, no-graphs, "
            "hf_rocm (default: stock,compile,hf_rocm, on a CPU without compile).",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Timed rounds. Every side runs once per round.", min=1)] = 5,
    layers: Layers = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="Tensor parallelism across N GPUs; starts N ranks.", min=2)
    ] = None,
    dtype: DtypeName = None,
    device: DeviceName = None,
    save: Save = None,
    segment: SegmentName = None,
    chart: ChartFile = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also list kernels and the gaps between them, and write a trace to FILE."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure decoding and prefill of a model, or the forwards of an encoder: stock, compiled stock, and hf_rocm.

    The sides run in turn, on one set of weights. The results of a side are checked first, and a side with wrong
    results is not timed; if hf_rocm's results are wrong, the command fails. The roofline is the shortest possible time
    at the copy bandwidth and matmul rate that were measured on this machine. Without ROCm, hf_rocm's path is forced,
    and the output contains a note. With --tp, transformers shards the model across N ranks on both sides, and the
    output lists what the ranks exchange.
    """
    from hf_rocm.tools.bench import record
    from hf_rocm.tools.bench.cases import Case, grid

    subject = subject_of(model, config, device, dtype, layers)
    check_files(save, chart, profile)
    if tp is not None and profile is not None:
        raise typer.BadParameter("--profile supports a single device: omit --tp")
    on_cpu = subject.device.type == "cpu"
    names = _sides(sides, on_cpu=on_cpu) if tp is None else _shared_sides(sides)
    batches = numbers(batch, "--batch")
    prompts = numbers(prompt or (_PROMPT_CPU if on_cpu else _PROMPT), "--prompt")
    new = new or (_NEW_CPU if on_cpu else _NEW)
    if subject.encoder:
        lengths = prompts if subject.inputs == "tokens" else [0]
        cases = [Case("encode", size, length) for length in lengths for size in batches]
    else:
        cases = grid(_kinds(kinds), batches, prompts, new=new)
    with Progress(every=15) as progress:
        result = _measure(subject, cases, names, tp, rounds=rounds, segment=segment, progress=progress.step)
    if save is not None:
        record.save(save, result)
    if json:
        print_json(result.to_dict())
    else:
        _print(result)
    if chart is not None:
        draw(result, chart)
    if profile is not None:
        _profile(subject, cases[0], profile)


def _sides(text: str | None, *, on_cpu: bool = False) -> list[str]:
    from hf_rocm.tools.bench.variants import COMPILE, DEFAULT, LABELS

    if text is None and on_cpu:
        everything = ",".join(DEFAULT)
        print_notice(f"torch.compile is left out, since it takes minutes on a CPU; --sides {everything} includes it")
        return [name for name in DEFAULT if name != COMPILE]
    names = [name.strip() for name in text.split(",")] if text is not None else list(DEFAULT)
    unknown = [name for name in names if name not in LABELS]
    if unknown:
        raise OptionError(f"--sides {text}: unknown side {unknown[0]!r}", facts={"known": ", ".join(LABELS)})
    return list(dict.fromkeys(names))


def _shared_sides(text: str | None) -> list[str]:
    from hf_rocm.tools.bench.variants import PREPARED, STOCK

    return [STOCK, PREPARED] if text is None else _sides(text)


def _measure(
    subject: Subject, cases: list[Case], names: list[str], tp: int | None, *, segment: str | None, **settings: Any
) -> Segment:
    """Measure on one device, or across several ranks."""
    if tp is None:
        from hf_rocm.tools.bench.run import bench as measure

        return measure(subject, cases, names, segment=segment or subject.name, **settings)
    from hf_rocm.tools.bench.ranks import bench_ranks

    return bench_ranks(subject, cases, names, ranks=tp, segment=segment or f"{subject.name}, tp {tp}", **settings)


def _kinds(text: str | None) -> list[str]:
    names = ["decode", "prefill"] if text is None else [name.strip() for name in text.split(",")]
    if not set(names) <= {"decode", "prefill"}:
        raise OptionError(f"--kinds {text} is not valid", facts={"allowed": "decode, prefill"})
    return names


def _print(segment: Segment) -> None:
    from hf_rocm.tools.bench import report

    for line in report.heading(segment):
        print_wrapped(line)
    for result in segment.results:
        print()
        print_wrapped(report.title(result))
        if result.timings:
            print_table(*report.table(result))
        for line in [*report.exchange(segment, result), *report.notes(result)]:
            print_wrapped(line)
        for line in report.reasons(result, segment.missing):
            print_notice(f"left out: {line}")
        for line in report.comparison(result):
            print_wrapped(line)


def _profile(subject: Subject, case: Case, trace: Path) -> None:
    from hf_rocm.tools.bench.profile import profile

    with Progress(every=15) as progress:
        summary = profile(subject, case, trace, progress=progress.step)
    print(f"\n{summary.title}")
    print_table(("kernel", "calls per step", "µs per step", "share"), summary.rows())
    for line in summary.lines():
        print(line)
    print_notice(f"trace: {trace} (chrome://tracing, perfetto)")


@bench.command("ops", cls=Command)
def ops(
    config: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Decoder whose shapes are timed: {', '.join(name for name in SHAPES if not SHAPES[name].encoder)}.",
            autocompletion=lambda: list(SHAPES),
        ),
    ] = "llama-8b",
    op: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Operations, such as linear,rope (default: all).")
    ] = None,
    rows: Annotated[str, typer.Option(metavar="SIZES", help="Rows of linear layers and norms.")] = "1,8,32,1024",
    batch: Annotated[str, typer.Option(metavar="SIZES", help="Batch sizes of attention.")] = "1,8",
    keys: Annotated[
        str, typer.Option(metavar="LENGTHS", help="Lengths of the cache in decode attention.")
    ] = "1024,32768",
    prompt: Annotated[
        int, typer.Option(metavar="TOKENS", help="Length of the prompt in prefill attention.", min=1)
    ] = 1024,
    dtype: DtypeName = None,
    device: DeviceName = None,
    save: Save = None,
    segment: SegmentName = None,
    refused: Annotated[bool, typer.Option("--refused", help="Also list what was not timed, and why.")] = False,
    json: Json = False,
) -> None:
    """Compare all implementations of every operation on this machine, at the shapes of a decoder.

    Every implementation is checked against fp64 first. Times are those of the device alone (in a captured graph if
    possible). The roofline is the shortest possible time at the measured copy bandwidth and matmul rate.
    """
    from hf_rocm.tools.bench import record
    from hf_rocm.tools.bench.ops_run import compare_ops

    subject = subject_of(None, config, device, dtype, None)
    check_files(save)
    with Progress(every=15) as progress:
        result = compare_ops(
            subject,
            _operations(op),
            rows=numbers(rows, "--rows"),
            batches=numbers(batch, "--batch"),
            keys=numbers(keys, "--keys"),
            prompt=prompt,
            segment=segment or f"ops {subject.name}",
            progress=progress.step,
        )
    if save is not None:
        record.save(save, result)
    if json:
        print_json(result.to_dict())
    else:
        _print_ops(result, refused=refused)


def _operations(text: str | None) -> list[str]:
    from hf_rocm.tools.bench.ops_cases import OPERATIONS, ROUTING

    known = (*OPERATIONS, ROUTING)
    names = list(known) if text is None else [name.strip() for name in text.split(",")]
    if not set(names) <= set(known):
        wrong = next(name for name in names if name not in known)
        raise OptionError(
            f"--op {text} is not valid", facts={"known": ", ".join(known)}, hint=did_you_mean(wrong, known)
        )
    return names


def _print_ops(segment: Segment, *, refused: bool) -> None:
    from hf_rocm.tools.bench import report

    for line in report.heading(segment):
        print_wrapped(line)
    for (operation, case), lines in report.kernels_by_case(segment).items():
        floor = f", roofline {lines[0]['floor']:.1f} µs ({lines[0]['bound']})" if lines[0]["floor"] else ""
        print(f"\n{operation}: {case}{floor}")
        timed = [row for row in lines if row["microseconds"] is not None]
        if timed:
            print_table(
                ("implementation", "µs", "× roofline", "of peak rate"), [report.kernel_row(row) for row in timed]
            )
        for row in lines:
            if refused and row["reason"] is not None:
                print_notice(f"{row['implementation']}: {row['reason']}")


bench.command("serve", cls=Command)(serve)
