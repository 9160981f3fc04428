"""`hf-rocm tune`: record the GEMMs of a model, find the fastest kernel for each, and manage the tables."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_rocm.cli.groups import ModelOrCommand, numbers
from hf_rocm.cli.help_text import Command
from hf_rocm.cli.output import check_output, print_error, print_facts, print_json, print_notice, print_table
from hf_rocm.cli.parameters import Json, OptionalModelPath
from hf_rocm.cli.progress import Progress

if TYPE_CHECKING:
    from hf_rocm.tools.tuning.commands import Tuning
    from hf_rocm.tools.tuning.table_commands import Checked

Batches = Annotated[str, typer.Option(metavar="SIZES", help="Batch sizes, such as 1,8,32.")]
Prompts = Annotated[str, typer.Option(metavar="LENGTHS", help="Prompt lengths in tokens, such as 128,1024.")]
ReleaseName = Annotated[
    str | None,
    typer.Option("--release", metavar="VERSION", help="The release of amd-aiter (default: the installed one)."),
]
GpuName = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="GFX:UNITS",
        help="The GPU and its compute units, such as gfx942:304 (default: this machine's).",
    ),
]
Files = Annotated[list[Path], typer.Argument(metavar="FILE", help="Tables of tuned GEMMs (CSV).")]


tune = typer.Typer(
    name="tune",
    cls=ModelOrCommand,
    no_args_is_help=True,
    subcommand_metavar="(MODEL | --shapes FILE | COMMAND) [OPTIONS]",
    help="Find the fastest kernel for every GEMM (matrix multiplication) of a model.",
)


@tune.command("model", cls=Command)
def model(
    model: OptionalModelPath = None,
    batch: Batches = "1",
    prompt: Prompts = "128,1024",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="The dtype, such as bfloat16 (default: that of the checkpoint)."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="ENGINE", help="aiter or tunableop (default: aiter on Instinct GPUs)."),
    ] = None,
    shuffled: Annotated[bool, typer.Option("--shuffled", help="Also tune for preshuffled weights.")] = False,
    shapes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tune the shapes in this file instead of those of a MODEL.")
    ] = None,
    shapes_only: Annotated[bool, typer.Option("--shapes-only", help="Record the shapes without tuning them.")] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the shapes to FILE.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Also tune shapes that were tuned before.")] = False,
    load: Annotated[
        bool, typer.Option("--load", help="Load the weights, for models whose shapes do not follow from the config.")
    ] = False,
    release: ReleaseName = None,
    gpu: GpuName = None,
    json: Json = False,
) -> None:
    """Find the fastest kernel for every GEMM (matrix multiplication) that MODEL runs in prefill and decode.

    Without --load, recording the shapes needs only the config of the model: no weights and no GPU. Tuning needs the
    GPU and takes minutes to hours. Without --again, tuned shapes are not tuned again. If the command is stopped,
    results for aiter are kept; those of TunableOp are written at the end. Without ROCm, the command prints the shapes
    and the command that tunes them, and exits with 1. If the folder of MODEL has the name of a command, such as list,
    pass it as ./list.
    """
    from hf_rocm.tools.tuning import commands

    if (model is None) == (shapes is None):
        raise typer.BadParameter("pass a MODEL, or a file of shapes with --shapes")
    if output is not None:
        check_output(output, parents=True)
    if not shapes_only and (missing := commands.no_gpu()) is not None:
        print_notice(f"{missing}: this run only records shapes")
    with Progress("runs of the model") as progress:
        job = commands.prepare(
            model,
            batches=numbers(batch, "--batch"),
            prompts=numbers(prompt, "--prompt"),
            dtype=dtype,
            engine=engine,
            shuffled=shuffled,
            shapes=shapes,
            output=output,
            load=load,
            again=again,
            release=release,
            gpu=gpu,
            progress=progress.count,
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
    work = f"{_count(job.todo, 'shape')} with {job.engine}"
    resumable = job.engine == commands.AITER
    note = "you can stop it: results so far are kept" if resumable else "results are written at the end"
    print(f"tuning {work}; {note}", file=sys.stderr, flush=True)
    with Progress("shapes tuned", every=30) as progress:
        result = commands.run(job, progress=progress.count)
    if json:
        print_json({**job.to_dict(), "result": result.to_dict()})
    else:
        print(f"tuned {result.tuned} of {len(job.todo)} in {progress.time}: {result.table}")
        if result.variables:
            print("to use them, start PyTorch with")
        for name, value in result.variables.items():
            print(f"  export {name}={shlex.quote(value)}")
    if result.missing:
        where = f"; see {result.log}" if result.log else ": not enough memory"
        print_notice(f"no kernel was found for {_count(result.missing, 'shape')}{where}")


@tune.command("list", cls=Command)
def list_tables(json: Json = False) -> None:
    """List the tables in use: your own, those tuned here, and those that aiter ships."""
    from hf_rocm.tools.tuning import table_commands

    inventory = table_commands.inventory()
    if json:
        print_json(inventory.to_dict())
        return
    print_facts(inventory.machine)
    if inventory.tables:
        print()
        rows = [(table.role, table.holds_for, str(table.rows), str(table.path)) for table in inventory.tables]
        print_table(("table", "valid for", "rows", "file"), rows)
    else:
        print("\nno tables yet: hf-rocm tune MODEL creates one")
    if inventory.recordings:
        print()
        print_table(("shapes of", "file"), [(name, str(file)) for name, file in inventory.recordings])
    for error in inventory.errors:
        print(file=sys.stderr)
        print_error(error)
    if inventory.errors:
        raise typer.Exit(1)


@tune.command("check", cls=Command)
def check(files: Files, release: ReleaseName = None, gpu: GpuName = None, json: Json = False) -> None:
    """Check whether aiter can use these tables as they are.

    Lists the lines that it can't use. Exits with 1 if there are any, or if a file can't be read as a table.
    """
    from hf_rocm.tools.tuning import table_commands

    checked, target, target_gpu = table_commands.check(files, release=release, gpu=gpu)
    if json:
        print_json(
            {
                "release": target.version,
                "gpu": None if target_gpu is None else target_gpu._asdict(),
                "files": [table.to_dict() for table in checked],
            }
        )
    else:
        print(f"amd-aiter {target.version}, {target_gpu or 'any GPU (--gpu gfx942:304 selects one)'}")
        for table in checked:
            _print_checked(table)
    if not all(table.good for table in checked):
        raise typer.Exit(1)


@tune.command("merge", cls=Command)
def merge(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="Tables. Rows of earlier tables take precedence.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write (default: in the cache).")
    ] = None,
    shipped: Annotated[bool, typer.Option(help="Include the tables that aiter ships.")] = True,
    release: ReleaseName = None,
    gpu: GpuName = None,
    json: Json = False,
) -> None:
    """Merge tables into one for this GPU.

    In order of preference: FILEs (or those of AITER_CONFIG_GEMM_BF16), tables tuned here, and those that aiter ships.
    hf_rocm merges them automatically before it imports aiter. Other programs read the file that AITER_CONFIG_GEMM_BF16
    specifies.
    """
    from hf_rocm.tools.tuning import table_commands

    result = table_commands.merge(files or None, output=output, shipped=shipped, release=release, gpu=gpu)
    if json:
        print_json(result.to_dict())
        return
    rows = [
        (share.role, str(share.taken), str(share.repeated), str(share.elsewhere), str(share.failed), str(share.path))
        for share in result.shares
    ]
    print_table(("table", "taken", "repeated", "other GPUs", "failed", "file"), rows)
    print(f"{result.rows} rows for {result.holds_for}: {result.path}")


def _print_job(job: Tuning) -> None:
    print(f"{job.name}: {_count(job.shapes, 'shape')}")
    rows = []
    for shape in job.shapes:
        words = ["bias"] * shape.bias + ["shuffled"] * shape.shuffled + ["tuned"] * (shape in job.done)
        rows.append((str(shape.m), str(shape.n), str(shape.k), shape.dtype.removeprefix("torch."), ", ".join(words)))
    print_table(("M", "N", "K", "dtype", ""), rows)
    if job.left_out:
        print(f"{len(job.left_out)} more are left out: aiter tunes bf16 and fp16 with K a multiple of 8")


def _print_why_not(job: Tuning, *, shapes_only: bool) -> None:
    """Print why nothing is tuned: all shapes are tuned, only the shapes were requested, or this machine can't tune."""
    if not job.todo:
        print("nothing to do: all shapes are already tuned (--again tunes them again)")
        return
    print(f"the shapes are in {job.file}")
    if shapes_only:
        return
    print(f"not tuned: {job.obstacle}")
    for label, line in job.commands.items():
        print(f"{label}, on the machine with the GPU:\n  {shlex.join(line)}")


def _print_checked(table: Checked) -> None:
    print(f"\n{table.path}")
    if table.error is not None:
        print(textwrap.indent(str(table.error), "  "))
        return
    count = len(table.problems) + table.more_problems
    valid = f"{table.rows} {'row is' if table.rows == 1 else 'rows are'} valid"
    print(f"  {valid}, {count} {'is' if count == 1 else 'are'} not" if count else f"  {valid}")
    for line, text in table.problems:
        print(f"  line {line}: {text}")
    if table.more_problems:
        print(f"  and {table.more_problems} more")
    for note in table.notes:
        print(f"  note: {note}")


def _count(items: Sized, name: str) -> str:
    return f"{len(items)} {name}{'s' * (len(items) != 1)}"
