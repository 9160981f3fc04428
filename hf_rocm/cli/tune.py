"""`hf-rocm tune`: record the products of a model, find the fastest kernel for each, and look after the tables."""

from __future__ import annotations

import shlex
import sys
import textwrap
import time
from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_rocm.cli.output import Counter, print_error, print_facts, print_json, print_notice, print_table
from hf_rocm.cli.parameters import Json
from hf_rocm.errors import OptionError

if TYPE_CHECKING:
    from hf_rocm.tuning.commands import Tuning
    from hf_rocm.tuning.upkeep import Checked

Batches = Annotated[str, typer.Option(metavar="SIZES", help="Batch sizes, such as 1,8,32.")]
Prompts = Annotated[str, typer.Option(metavar="LENGTHS", help="Prompt lengths in tokens, such as 128,1024.")]
ReleaseName = Annotated[
    str | None,
    typer.Option("--release", metavar="VERSION", help="The amd-aiter that is meant (default: the installed one)."),
]
GpuName = Annotated[
    str | None, typer.Option("--gpu", metavar="GFX:UNITS", help="The GPU that is meant, such as gfx942:304.")
]
Files = Annotated[list[Path], typer.Argument(metavar="FILE", help="Tables of tuned products (CSV).")]


class _ModelOrCommand(typer.core.TyperGroup):
    """`hf-rocm tune MODEL` beside `hf-rocm tune list`: whatever isn't one of our words is a model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["model", *args]
        return super().parse_args(ctx, args)


tune = typer.Typer(
    name="tune",
    cls=_ModelOrCommand,
    no_args_is_help=True,
    subcommand_metavar="MODEL | COMMAND [ARGS]...",
    help="Find the fastest kernel for each product (GEMM) of a model: hf-rocm tune MODEL. A folder called like one of "
    "these words is ./list.",
)


@tune.command("model")
def model(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A model's folder, or its hub name.")] = None,
    batch: Batches = "1",
    prompt: Prompts = "128,1024",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="Such as bfloat16 (default: its own).")
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="ENGINE", help="aiter or tunableop (default: by GPU).")
    ] = None,
    shuffled: Annotated[bool, typer.Option("--shuffled", help="For preshuffled weights too.")] = False,
    shapes: Annotated[Path | None, typer.Option(metavar="FILE", help="Tune these shapes; no MODEL.")] = None,
    shapes_only: Annotated[bool, typer.Option("--shapes-only", help="Record the shapes and tune nothing.")] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the shapes here too.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Also tune what was tuned before.")] = False,
    load: Annotated[bool, typer.Option("--load", help="Run it with its weights, where the config can't tell.")] = False,
    release: ReleaseName = None,
    gpu: GpuName = None,
    json: Json = False,
) -> None:
    """Record the products that MODEL runs in prefill and decode, and tune each of them for this GPU.

    The model is built from its config: neither its weights nor a GPU are needed to see its shapes. Tuning needs
    the GPU, and minutes to hours; what was found by then is kept when it is stopped, and not tuned again. Without
    ROCm, the shapes and the command that tunes them are given, with exit code 1.
    """
    from hf_rocm.tuning import commands

    if (model is None) == (shapes is None):
        raise typer.BadParameter("give a MODEL, or a file of shapes with --shapes")
    with Counter("runs of the model") as progress:
        job = commands.prepare(
            model,
            batches=_numbers(batch, "--batch"),
            prompts=_numbers(prompt, "--prompt"),
            dtype=dtype,
            engine=engine,
            shuffled=shuffled,
            shapes=shapes,
            output=output,
            load=load,
            again=again,
            release=release,
            gpu=gpu,
            progress=progress,
        )
    if not json:
        _print_job(job)
    if shapes_only or not job.todo or job.obstacle is not None:
        if json:
            print_json({**job.to_dict(), "result": None})
        else:
            _print_why_not(job, shapes_only=shapes_only)
        if job.todo and not shapes_only:
            raise typer.Exit(1)
        return
    with _Clock(job) as clock:
        result = commands.run(job, progress=clock)
    if json:
        print_json({**job.to_dict(), "result": result.to_dict()})
    else:
        print(f"tuned {result.tuned} of {len(job.todo)} in {clock.time}: {result.table}")
        if result.variables:
            print("to use them, start PyTorch with")
        for name, value in result.variables.items():
            print(f"  export {name}={shlex.quote(value)}")
    if result.missing:
        where = f"; see {result.log}" if result.log else ": not enough memory"
        print_notice(f"nothing was found for {_count(result.missing, 'shape')}{where}")


@tune.command("list")
def list_tables(json: Json = False) -> None:
    """The tables that count here: yours, those tuned here, and those that aiter ships."""
    from hf_rocm.tuning import upkeep

    found = upkeep.inventory()
    if json:
        print_json(found.to_dict())
        return
    print_facts(found.machine)
    if found.tables:
        print()
        rows = [(each.role, each.holds_for, str(each.rows), str(each.path)) for each in found.tables]
        print_table(("table", "holds for", "rows", "file"), rows)
    else:
        print("\nno tables yet: hf-rocm tune MODEL makes one")
    if found.recordings:
        print()
        print_table(("shapes of", "file"), [(name, str(file)) for name, file in found.recordings])
    for error in found.errors:
        print(file=sys.stderr)
        print_error(error)
    if found.errors:
        raise typer.Exit(1)


@tune.command("check")
def check(files: Files, release: ReleaseName = None, gpu: GpuName = None, json: Json = False) -> None:
    """Say whether aiter could use these tables as they are, and which lines are in the way.

    Exits with 1 if a file has such lines.
    """
    from hf_rocm.tuning import upkeep

    checked, meant, here = upkeep.check(files, release=release, gpu=gpu)
    if json:
        print_json(
            {
                "release": meant.version,
                "gpu": None if here is None else here._asdict(),
                "files": [each.to_dict() for each in checked],
            }
        )
    else:
        print(f"amd-aiter {meant.version}, {here or 'any GPU (--gpu gfx942:304 names one)'}")
        for each in checked:
            _print_checked(each)
    if not all(each.good for each in checked):
        raise typer.Exit(1)


@tune.command("merge")
def merge(
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Tables; the first one wins.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to (default: the cache).")] = None,
    shipped: Annotated[bool, typer.Option(help="With the tables that aiter ships.")] = True,
    release: ReleaseName = None,
    gpu: GpuName = None,
    json: Json = False,
) -> None:
    """Merge tables into one for this GPU: FILEs (else those of AITER_CONFIG_GEMM_BF16), tuned here, shipped.

    hf_rocm does this by itself before it imports aiter. Use the file elsewhere as AITER_CONFIG_GEMM_BF16.
    """
    from hf_rocm.tuning import upkeep

    done = upkeep.merge(files or None, output=output, shipped=shipped, release=release, gpu=gpu)
    if json:
        print_json(done.to_dict())
        return
    rows = [
        (each.role, str(each.taken), str(each.repeated), str(each.elsewhere), str(each.failed), str(each.path))
        for each in done.shares
    ]
    print_table(("table", "taken", "repeated", "other GPUs", "failed", "file"), rows)
    print(f"{done.rows} rows for {done.holds_for}: {done.path}")


class _Clock:
    """Progress of tuning: redrawn on a terminal, elsewhere a line each half minute, with the time that it took."""

    def __init__(self, job: Tuning) -> None:
        self._began = self._last = time.monotonic()
        self._live = sys.stderr.isatty()
        self._what = f"{_count(job.todo, 'shape')} with {job.engine}"

    def __enter__(self) -> _Clock:
        print(f"tuning {self._what}; what is found by then is kept when you stop it", file=sys.stderr, flush=True)
        return self

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last > (0.4 if self._live else 30.0):
            self._last = now
            text = f"{done} of {total} shapes tuned, {self.time}"
            print(f"\r{text}" if self._live else text, end="" if self._live else "\n", file=sys.stderr, flush=True)

    def __exit__(self, *exception: object) -> None:
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    @property
    def time(self) -> str:
        seconds = int(time.monotonic() - self._began)
        return f"{seconds // 60} min {seconds % 60} s" if seconds >= 60 else f"{seconds} s"


def _print_job(job: Tuning) -> None:
    print(f"{job.name}: {_count(job.shapes, 'shape')}")
    rows = []
    for each in job.shapes:
        words = ["bias"] * each.bias + ["shuffled"] * each.shuffled + ["tuned"] * (each in job.done)
        rows.append((str(each.m), str(each.n), str(each.k), each.dtype.removeprefix("torch."), ", ".join(words)))
    print_table(("M", "N", "K", "dtype", ""), rows)
    if job.left_out:
        print(f"without {len(job.left_out)} more: aiter is asked for bf16 and fp16 with K a multiple of 8")


def _print_why_not(job: Tuning, *, shapes_only: bool) -> None:
    """Nothing is tuned: because nothing is left, because only the shapes were asked for, or because it can't be."""
    if not job.todo:
        print("nothing to do: all of them are tuned (--again repeats it)")
        return
    print(f"the shapes are in {job.file}")
    if shapes_only:
        return
    print(f"not tuned: {job.obstacle}")
    for how, line in job.elsewhere.items():
        print(f"{how}, on the machine with the GPU:\n  {shlex.join(line)}")


def _print_checked(each: Checked) -> None:
    print(f"\n{each.path}")
    if each.error is not None:
        print(textwrap.indent(str(each.error), "  "))
        return
    count = len(each.problems) + each.more_problems
    right = f"{each.rows} {'row is' if each.rows == 1 else 'rows are'} right"
    print(f"  {right}, {count} {'is' if count == 1 else 'are'} not" if count else f"  {right}")
    for line, text in each.problems:
        print(f"  line {line}: {text}")
    if each.more_problems:
        print(f"  and {each.more_problems} more")
    for note in each.notes:
        print(f"  note: {note}")


def _count(what: Sized, name: str) -> str:
    return f"{len(what)} {name}{'s' * (len(what) != 1)}"


def _numbers(text: str, option: str) -> list[int]:
    numbers = [each.strip() for each in text.split(",")]
    if not all(each.isascii() and each.isdecimal() and 0 < int(each) <= 10**7 for each in numbers):
        raise OptionError(f"{option} {text} is not understood", hint=f"write whole numbers: {option} 1,8,32")
    return sorted({int(each) for each in numbers})
