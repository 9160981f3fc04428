"""Generate pages of the documentation from the sources: commands, Python, environment variables."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
_WRITTEN = "<!-- written by scripts/build-docs -->\n\n"


def pages() -> dict[Path, str]:
    """Every generated page and its text, from the imported hf_rocm."""
    return {
        REFERENCE / "commands.md": _WRITTEN + "# Commands\n\n" + "\n".join(_commands()),
        REFERENCE / "python.md": _WRITTEN + "# Python\n\n" + "\n".join(_public()),
        REFERENCE / "environment.md": _WRITTEN + _environment(),
    }


def _commands() -> Iterator[str]:
    import typer

    from hf_rocm.cli.app import build

    yield "Results go to stdout, everything else to stderr. Exit codes: 0 done or nothing to do, 1 refused (the"
    yield "message has the next step), 2 usage, 3 a bug in hf-rocm. `python -m hf_rocm` is the same as `hf-rocm`.\n"
    yield from _command("hf-rocm", typer.main.get_command(build()))


def _command(name: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    if inner:
        for word, item in sorted(inner.items()):
            yield from _command(f"{name} {word}", item)
        return
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    usage = " ".join([name, *(_argument(argument) for argument in arguments), *(["[OPTIONS]"] if options else [])])
    yield f"## {name}\n\n```text\n{usage}\n```\n"
    yield _paragraphs(inspect.cleandoc(command.help or "")) + "\n"
    rows = [(f"`{argument.metavar or argument.name.upper()}`", argument.help or "") for argument in arguments]
    rows += [(_spelling(option), option.help or "") for option in options if not option.hidden]
    if rows:
        yield "| | |\n| --- | --- |"
        yield "\n".join(f"| {left} | {right.replace('|', chr(92) + '|')} |" for left, right in rows) + "\n"


def _argument(argument: Any) -> str:
    shown = argument.metavar or argument.name.upper()
    shown += "..." if argument.nargs == -1 else ""
    return shown if argument.required else f"[{shown}]"


def _spelling(option: Any) -> str:
    words = "/".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    return f"`{words}{value}`"


def _public() -> Iterator[str]:
    import hf_rocm

    yield "The public names of `hf_rocm`. Importing it imports neither torch nor transformers.\n"
    names = [name for name in hf_rocm.__all__ if not name.startswith("__")]
    for name in sorted(names, key=str.lower):
        yield from _entry(f"hf_rocm.{name}", getattr(hf_rocm, name))
    operations = importlib.import_module("hf_rocm.ops")
    for name in sorted(operations.__all__):
        value = getattr(operations, name)
        if inspect.isfunction(value):
            yield from _entry(f"hf_rocm.ops.{name}", value)


def _entry(name: str, value: object) -> Iterator[str]:
    yield f"## {name}\n"
    if callable(value):
        kind = "class " if inspect.isclass(value) else ""
        yield f"```text\n{kind}{name}{_signature(value)}\n```\n"
    yield f"```text\n{inspect.getdoc(value) or ''}\n```\n"


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(…)"
    text = re.sub(r"<(?:object object|function \S+) at 0x[0-9a-f]+>", "…", text)
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are strings here
    if len(text) < 100:
        return text
    return re.sub(r", (?=\*?\*?\w+(?::|=|\)))|, (?=\*,)", ",\n    ", text)


def _environment() -> str:
    from hf_rocm.options import VARIABLES

    rows = "".join(f"| `{variable.name}` | {variable.values} | {variable.meaning} |\n" for variable in VARIABLES)
    return f"""# Environment variables

If hf_rocm is inert (no ROCm, and not forced), all are ignored. Arguments of `from_pretrained` and `prepare` take
precedence.

| Variable | Values | Meaning |
| --- | --- | --- |
{rows}"""


def _paragraphs(text: str) -> str:
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text).replace("\f", "")
