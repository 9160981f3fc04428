"""`hf-rocm bench serve`: measure `transformers serve` under HTTP traffic, stock and with hf_rocm."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from hf_rocm.cli.bench_shared import check_files, draw, subject_of
from hf_rocm.cli.groups import numbers
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

if TYPE_CHECKING:
    from hf_rocm.tools.bench.record import Segment
    from hf_rocm.tools.bench.serving.traffic import Load


def serve(
    model: OptionalModelPath = None,
    config: ConfigName = None,
    clients: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Numbers of clients, such as 1,8,64: one closed loop per number (default: 8; none with --rate alone).",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="RATES", help="Requests per second, such as 0.5,4: one open loop per number."),
    ] = None,
    requests: Annotated[int, typer.Option(metavar="N", help="Requests per loop.", min=1)] = 64,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Stop sending the requests of a loop after S seconds.", min=0.1)
    ] = 120.0,
    prompt: Annotated[
        str,
        typer.Option(metavar="LENGTHS", help="Tokens per prompt: a number, or a range from which lengths are drawn."),
    ] = "60-510",
    new: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens per answer.", min=2)] = 128,
    answers: Annotated[
        str, typer.Option(metavar="KIND", help="streamed, whole (non-streaming), or both (alternating).")
    ] = "streamed",
    endpoint: Annotated[
        str, typer.Option(metavar="NAME", help="completions (text) or chat (messages, with the chat template).")
    ] = "completions",
    abandon: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="The share of streams, such as 0.1, whose client disconnects after half of the answer.",
            min=0,
            max=1,
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="The seed for prompts and arrival times.")] = 0,
    batching: Annotated[
        bool,
        typer.Option(
            "--continuous-batching/--no-continuous-batching", help="Whether both servers use continuous batching."
        ),
    ] = True,
    serve_args: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Arguments for transformers serve, such as '--cb-num-blocks 512'."),
    ] = "",
    timeout: Annotated[
        float, typer.Option(metavar="S", help="Time limit for one answer, in seconds.", min=0.1)
    ] = 120.0,
    start_timeout: Annotated[
        float, typer.Option(metavar="S", help="Time limit for a server to load the model, in seconds.", min=1)
    ] = 600.0,
    stock: Annotated[
        bool, typer.Option("--stock/--no-stock", help="Whether stock is measured too. Answers are always compared.")
    ] = True,
    layers: Layers = None,
    dtype: DtypeName = None,
    device: DeviceName = None,
    save: Save = None,
    segment: SegmentName = None,
    chart: ChartFile = None,
    json: Json = False,
) -> None:
    """Measure `transformers serve` over HTTP on this machine, stock and with hf_rocm.

    Both servers answer the same greedy requests first; if hf_rocm's answers differ by more than the dtype allows,
    nothing is timed. One server runs at a time, and no server outlives the command. Prompts are random words. Without
    ROCm, hf_rocm's path is forced, and the output contains a note.
    """
    from hf_rocm.tools.bench import record
    from hf_rocm.tools.bench.serving import server
    from hf_rocm.tools.bench.serving.run import Settings, bench_serving
    from hf_rocm.tools.bench.variants import PREPARED, STOCK

    loads = _loads(clients, rate, requests, prompt, new, answers, seed, seconds, endpoint, abandon)
    check_files(save, chart)
    server.check()
    subject = subject_of(model, config, device, dtype, layers)
    sides = (STOCK, PREPARED) if stock else (PREPARED,)
    settings = Settings(batching, _arguments(serve_args), timeout, start_timeout, sides)
    with Progress(every=15) as progress:
        result = bench_serving(
            subject, loads, settings, segment=segment or f"serve {subject.name}", progress=progress.step
        )
    if save is not None:
        record.save(save, result)
    if json:
        print_json(result.to_dict())
    else:
        _print(result)
    if chart is not None:
        draw(result, chart)


def _loads(
    clients: str | None,
    rate: str | None,
    requests: int,
    prompt: str,
    new: int,
    answers: str,
    seed: int,
    seconds: float,
    endpoint: str,
    abandoned_share: float,
) -> list[Load]:
    from hf_rocm.tools.bench.serving.client import PATHS
    from hf_rocm.tools.bench.serving.traffic import RESPONSES, Load

    if answers not in RESPONSES:
        raise OptionError(f"--answers {answers} is not valid", facts={"allowed": ", ".join(RESPONSES)})
    if endpoint not in PATHS:
        raise OptionError(f"--endpoint {endpoint} is not valid", facts={"allowed": ", ".join(PATHS)})
    shortest, longest = _lengths(prompt)
    loops: list[tuple[int | None, float | None]] = []
    if clients is not None or rate is None:
        loops += [(number, None) for number in numbers(clients or "8", "--clients")]
    if rate is not None:
        loops += [(None, number) for number in _rates(rate)]
    return [
        Load(*loop, requests, shortest, longest, new, answers, seed, seconds, endpoint, abandoned_share)
        for loop in loops
    ]


def _lengths(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", text.strip(), re.ASCII)
    shortest, longest = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < shortest <= longest:
        raise OptionError(f"--prompt {text} is not valid", hint="pass a number or a range: --prompt 60-510")
    return shortest, longest


def _rates(text: str) -> list[float]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,6}(\.\d{1,6})?", word, re.ASCII) and float(word) > 0 for word in words):
        raise OptionError(f"--rate {text} is not valid", hint="pass requests per second: --rate 0.5,4")
    return sorted({float(word) for word in words})


def _arguments(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise OptionError(f"--serve-args {text} is not valid", facts={"because": error}) from error


def _print(segment: Segment) -> None:
    from hf_rocm.tools.bench import report
    from hf_rocm.tools.bench.serving import figures
    from hf_rocm.tools.bench.serving.agreement import Agreement
    from hf_rocm.tools.bench.serving.traffic import Load

    assert segment.serving is not None
    served = segment.serving
    for line in [*report.heading(segment), shlex.join(served["command"])]:
        print_wrapped(line)
    print_wrapped(Agreement.from_dict(served["parity"]).sentence)
    for group in figures.by_case(served["cases"]):
        print()
        print_wrapped(f"{group[0]['title']}: {Load(**group[0]['load']).details}")
        print_table(*figures.table(group))
        for line in figures.notes(group):
            print_notice(line)
    print()
    print_wrapped("times: median / 95th / 99th percentile")
    for line in served["explained"]:
        print_wrapped(f"hf_rocm: {line}")
