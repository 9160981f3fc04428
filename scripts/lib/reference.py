"""Generate pages of the documentation from the sources: commands, Python, environment variables, diagrams."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from lib import diagrams

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
_WRITTEN = "<!-- written by scripts/build-docs -->\n\n"


def pages() -> dict[Path, str]:
    """Every generated page and its text. The reference pages describe the hf_rocm that is imported."""
    return {
        REFERENCE / "commands.md": _WRITTEN + "# Commands\n\n" + "\n".join(_commands()),
        REFERENCE / "python.md": _WRITTEN + "# Python\n\n" + "\n".join(_public()),
        REFERENCE / "environment.md": _WRITTEN + _environment(),
        **diagrams.pages(ROOT),
    }


def _commands() -> Iterator[str]:
    import typer

    from hf_rocm.cli.app import build

    yield "Results go to stdout, everything else to stderr. Exit codes: 0 done or nothing to do, 1 refused (the"
    yield "message has the next step), 2 a usage error, 3 a bug in hf-rocm. `python -m hf_rocm` is the same as"
    yield "`hf-rocm`.\n"
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
    yield from prose(inspect.getdoc(value) or "", _parameters(value))


def prose(docstring: str, parameters: Collection[str] = ()) -> Iterator[str]:
    """Yield the paragraphs of a docstring in Markdown, with the names of parameters as code.

    A line of the docstring begins a paragraph if the previous line ends a sentence and either the line begins with a
    lower-case name and a colon, like the description of a parameter, or its first word would have fit on the previous
    line. A block with an indented line becomes a code block, without other changes.
    """
    limit = LINE_LENGTH - 4
    for block in docstring.split("\n\n"):
        lines = block.splitlines()
        if any(line.startswith(" ") for line in lines):
            yield f"```text\n{block}\n```\n"
            continue
        paragraphs = [[line] for line in lines[:1]]
        for before, line in itertools.pairwise(lines):
            is_short = len(before) + 1 + len(line.split(" ")[0]) <= limit
            if before.endswith(".") and (is_short or _ARGUMENT.match(line)):
                paragraphs.append([line])
            else:
                paragraphs[-1].append(line)
        yield from (_markdown(" ".join(paragraph), parameters) + "\n" for paragraph in paragraphs)


LINE_LENGTH = 120
_ARGUMENT = re.compile(r"[a-z_][a-z_0-9]*(?:, [a-z_][a-z_0-9]*)*(?=: )")


def _markdown(text: str, parameters: Collection[str]) -> str:
    """Mark parameters that are followed by a colon as code, and escape characters that Markdown interprets."""

    def marked(names: re.Match[str]) -> str:
        words = names[0].split(", ")
        return ", ".join(f"`{word}`" for word in words) if set(words) <= set(parameters) else names[0]

    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(rf"(?<![\w.]){_ARGUMENT.pattern}", marked, part) for part in parts[::2]]
    parts = re.split(r"(`[^`]*`)", "".join(parts))
    parts[::2] = [re.sub(r"(?<!\w)_|_(?!\w)|[\\*<\[\]]", r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


def _parameters(value: Any) -> Collection[str]:
    """The parameters of a function, or the annotated attributes and constructor parameters of a class."""
    try:
        names = set(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        names = set()
    return names | set(getattr(value, "__annotations__", {}))


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(…)"
    text = re.sub(r"<(?:object object|function \S+) at 0x[0-9a-f]+>", "…", text)
    # `from __future__ import annotations` makes annotations strings, which are printed in quotes
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    if len(text) < 100:
        return text
    return re.sub(r", (?=\*?\*?\w+(?::|=|\)))|, (?=\*,)", ",\n    ", text)


def _environment() -> str:
    from hf_rocm.options import VARIABLES

    rows = "".join(f"| `{variable.name}` | {variable.values} | {variable.meaning} |\n" for variable in VARIABLES)
    return f"""# Environment variables

Where the ROCm path is off (without ROCm, and not forced), only `HF_ROCM_FORCE` affects models. Arguments of
`from_pretrained` and `prepare` take precedence.

| Variable | Values | Meaning |
| --- | --- | --- |
{rows}"""


def _paragraphs(text: str) -> str:
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text).replace("\f", "")
