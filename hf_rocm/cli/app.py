"""The table of commands, and the handler that prints errors and sets exit codes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from hf_rocm import __version__, options
from hf_rocm.cli.bench import bench
from hf_rocm.cli.doctor import doctor
from hf_rocm.cli.env import env
from hf_rocm.cli.explain import explain
from hf_rocm.cli.groups import StartPage
from hf_rocm.cli.help import help
from hf_rocm.cli.help_text import Command
from hf_rocm.cli.install_overlays import install_overlays
from hf_rocm.cli.output import print_error, print_json, print_notice
from hf_rocm.cli.port_check import port_check
from hf_rocm.cli.quantize import quantize
from hf_rocm.cli.status import status
from hf_rocm.cli.tune import tune
from hf_rocm.cli.uninstall_overlays import uninstall_overlays
from hf_rocm.cli.verify import verify
from hf_rocm.cli.warmup import warmup
from hf_rocm.errors import HfRocmError
from hf_rocm.overlay.install import Interrupted

COMMANDS: tuple[Callable[..., Any], ...] = (
    doctor,
    install_overlays,
    uninstall_overlays,
    status,
    explain,
    warmup,
    verify,
    quantize,
    port_check,
    env,
    help,
)

REFUSED, BUG = 1, 3


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        build()(args=None if arguments is None else list(arguments), prog_name="hf-rocm")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except HfRocmError as error:
        if "--json" in (sys.argv[1:] if arguments is None else arguments):
            print_json(error.to_dict())
        print_error(error)
        return REFUSED
    except Interrupted as interrupted:
        if "--json" in (sys.argv[1:] if arguments is None else arguments):
            print_json({"error": "Interrupted", "message": str(interrupted), "facts": {}, "hint": None})
        print(interrupted, file=sys.stderr)
        return 128 + interrupted.signal
    except Exception:  # noqa: BLE001 (everything else is a bug in hf-rocm)
        traceback.print_exc()
        print(f"\nerror: this is a bug in hf-rocm {__version__}; please report it with the text above", file=sys.stderr)
        return BUG
    return 0


def build() -> typer.Typer:
    """Build the application: every function in `COMMANDS` becomes a command, and `bench` and `tune` are groups."""
    app = typer.Typer(
        cls=StartPage,
        pretty_exceptions_enable=False,
        # Plain help truncates nothing and does not import rich.
        rich_markup_mode=None,
        subcommand_metavar="COMMAND [ARGUMENTS]",
        # Every command has these options, because contexts inherit them.
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Makes Hugging Face transformers fast on AMD GPUs (ROCm). On other machines, models stay stock. "
        "Every change can be undone.",
    )
    app.callback()(_options)
    for command in COMMANDS:
        app.command(cls=Command)(command)
    app.add_typer(bench)
    app.add_typer(tune)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hf-rocm {__version__}")
        raise typer.Exit


def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # doctor lists unknown variables and invalid values in its report.
    if context.invoked_subcommand != "doctor":
        options.check_names()
    if context.invoked_subcommand in ("status", "install-overlays", "uninstall-overlays"):
        # Other commands raise this error if they use the option.
        wrong = options.invalid(options.environment())
        if wrong is not None:
            print_notice(f"{wrong.message}; `hf-rocm doctor` lists the allowed values")
