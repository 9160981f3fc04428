"""The public interface as data. `tests/public_interface.json` records it, and `test_public_interface.py` compares it.

A removed key or a changed value breaks programs. A new key breaks nothing, but must be recorded so that later runs
compare it.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import typer

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_suffix(".json")

Record = dict[str, Any]

# Objects whose keys are data, such as names of layers. All values in such an object have the same path, `{}`.
DATA_KEYS = frozenset({"commands", "expected", "facts", "left", "missing", "patterns", "stock", "unread", "variables"})


def load() -> Record:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def save(section: str, value: Record) -> None:
    """Replace one section of the recorded file."""
    sections = {**(load() if FILE.is_file() else {}), section: value}
    FILE.write_text(json.dumps(sections, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def differences(recorded: Record, current: Record) -> list[str]:
    """One line per entry that was removed, was changed or is not recorded yet."""
    removed = [f"gone: {name}: {recorded[name]!r}" for name in recorded.keys() - current.keys()]
    new = [f"not recorded: {name}: {current[name]!r}" for name in current.keys() - recorded.keys()]
    changed = [
        f"changed: {name}: {recorded[name]!r} became {current[name]!r}"
        for name in recorded.keys() & current.keys()
        if recorded[name] != current[name]
    ]
    return sorted([*removed, *changed, *new])


def names(module_name: str) -> Record:
    """The public names of a module with their signatures, and classes with their bases and public members."""
    module = importlib.import_module(module_name)
    listed = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", None) == module_name
    ]
    result: Record = {}
    for name in sorted(listed):
        if not name.startswith("_") or name == "__version__":
            result.update(_described(f"{module_name}.{name}", getattr(module, name)))
    return result


def _described(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        yield path, f"class({bases}){_signature(value)}"
        for name, member in sorted(vars(value).items()):
            if not name.startswith("_"):
                yield from _member(f"{path}.{name}", member)
    elif callable(value):
        yield path, _signature(value)
    else:
        yield path, type(value).__name__


def _member(path: str, member: Any) -> Iterator[tuple[str, str]]:
    function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
    if isinstance(member, property):
        yield path, "property"
    elif callable(function):
        yield path, _signature(function)
    else:
        yield path, type(member).__name__


def _signature(function: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(function)))


def commands() -> Record:
    """Every command with its arguments and options: name, type, default, and whether it is required or repeatable.

    For `check_version`, which uses argparse: the default, `nargs`, and whether it is required.
    """
    from hf_rocm import check_version
    from hf_rocm.cli.app import build

    result: Record = {}
    _add_commands("hf-rocm", typer.main.get_command(build()), result)
    for action in check_version._parser()._actions:
        if not isinstance(action, argparse._HelpAction):
            key = f"python -m hf_rocm.check_version {' '.join(action.option_strings) or action.metavar}"
            result[key] = {"default": action.default, "nargs": action.nargs, "required": action.required}
    return result


def _add_commands(path: str, command: Any, result: Record) -> None:
    result[path] = "command"
    hints = get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}
    for parameter in command.params:
        # typer's type objects depend on its release.
        if parameter.name in hints:
            spelling = " ".join([*parameter.opts, *parameter.secondary_opts])
            result[f"{path} {spelling}"] = {
                "argument": parameter.param_type_name == "argument",
                "type": inspect.formatannotation(hints[parameter.name]),
                "default": parameter.default,
                "required": parameter.required,
                "multiple": bool(getattr(parameter, "multiple", False) or parameter.nargs == -1),
            }
    for name, child in getattr(command, "commands", {}).items():
        _add_commands(f"{path} {name}", child, result)


def variables() -> Record:
    """The environment variables that the README lists, with their values."""
    from hf_rocm.options import VARIABLES

    return {variable.name: variable.values for variable in VARIABLES}


def promises() -> Record:
    """The numbered promises of docs/promises.md, with their tests."""
    text = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    tests = "\n".join(
        file.read_text(encoding="utf-8") for file in sorted((ROOT / "tests/overlay/promises").glob("test_*.py"))
    )
    defined = re.findall(r"^def (test_\d\d\w+)", tests, re.MULTILINE)
    return {
        number: sorted(name for name in defined if f"_{int(number):02}_" in name)
        for number in re.findall(r"^\| (\d+) \| .* \[test_", text, re.MULTILINE)
    }


def codes() -> Record:
    """The constants in JSON outputs that programs compare against, by location."""
    from hf_rocm import errors
    from hf_rocm.overlay import audit, plan, state
    from hf_rocm.tools.doctor.report import Level
    from hf_rocm.tools.porting.findings import Severity

    return {
        "error": sorted(
            name
            for name, value in vars(errors).items()
            if inspect.isclass(value) and value.__module__ == errors.__name__
        ),
        "installed": _values(state.Installed),
        "match": _values(state.Match),
        "action": _values(plan.Verb),
        "record finding": _values(audit.Finding),
        "doctor level": _values(Level),
        "port-check severity": _values(Severity),
        "port-check rule": sorted(_rules()),
        "doctor finding": sorted(_doctor_findings()),
    }


def _values(kind: type[enum.Enum]) -> list[str]:
    return sorted(str(member.value) for member in kind)


def _rules() -> Iterator[str]:
    from hf_rocm.tools.porting import rules
    from hf_rocm.tools.porting.findings import Rule

    for info in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
        for value in vars(importlib.import_module(info.name)).values():
            for rule in [value, *(value.values() if isinstance(value, dict) else ())]:
                if isinstance(rule, Rule):
                    yield rule.name


def _doctor_findings() -> set[str]:
    """The names of doctor's checks, with the levels that occur on recorded machines."""
    from hf_rocm.tools.doctor.examine import doctor
    from tests.tools.recorded import NAMES, Recorded

    reports = [doctor(machine=Recorded(name)) for name in NAMES]
    return {f"{finding.check}: {finding.level.value}" for report in reports for finding in report.findings}


def shape(value: Any, path: str = "") -> dict[str, set[str]]:
    """Returns every path of a JSON value with its types. `[]` stands for any item of an array."""
    result = {path: {_type(value)}}
    if isinstance(value, Mapping):
        data = path.rpartition(".")[2] in DATA_KEYS
        children = [(f"{path}.{{}}" if data else f"{path}.{key}", item) for key, item in value.items()]
    else:
        children = [(f"{path}[]", item) for item in value] if isinstance(value, list) else []
    for child, item in children:
        for inner, types in shape(item, child).items():
            result.setdefault(inner, set()).update(types)
    return result


def _type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]
