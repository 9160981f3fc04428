"""An overlay directory's `manifest.toml`: which releases it covers, and the digests that were seen in them.

    transformers = ">=5.4,<6"

    [llama.files]
    "<sha256 of a whole stock file>" = ["5.4.0", …]

    [llama.names."transformers.models.llama.modeling_llama:LlamaMLP"]
    "<digest of that definition>" = ["5.4.0", …]

The names are what the overlay's text imports from transformers: its import list is its dependency list.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hf_rocm.errors import OverlayError

_NAME = re.compile(r"transformers(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*")
Seen = Mapping[str, tuple[str, ...]]  # a hash or digest → the releases where it was seen


@dataclass(frozen=True)
class Record:
    """What was seen of one model: hashes of its whole file, and digests of each name that its overlay needs."""

    files: Seen = field(default_factory=dict)
    names: Mapping[str, Seen] = field(default_factory=dict)

    def releases(self) -> set[str]:
        return {release for releases in self.files.values() for release in releases}


@dataclass(frozen=True)
class Manifest:
    """One directory's range of releases (PEP 440) and its record of each model."""

    transformers: str
    records: Mapping[str, Record] = field(default_factory=dict)


def parse(text: str, *, source: object) -> Manifest:
    """Read a manifest. Raises `OverlayError` naming the file and what is wrong with it."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data = tomllib.loads(text)
        requires = data.pop("transformers")
        if not isinstance(requires, str):
            raise TypeError("`transformers` must be a string")
        return Manifest(requires, {model: _record(table) for model, table in data.items()})
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise OverlayError(
            "an overlay manifest can't be read",
            facts={"file": source, "found": f"{type(error).__name__}: {error}"},
            hint="reinstall hf-rocm",
        ) from error


def render(manifest: Manifest) -> str:
    """The manifest as text, equal for equal manifests. Releases keep their order."""
    lines = [f'transformers = "{manifest.transformers}"']
    for model, record in sorted(manifest.records.items()):
        lines += ["", f"[{model}.files]", *_entries(record.files)]
        for name, seen in sorted(record.names.items()):
            lines += ["", f'[{model}.names."{name}"]', *_entries(seen)]
    return "\n".join(lines) + "\n"


def dependencies(overlay_text: str) -> list[str]:
    """What an overlay imports from transformers, as `module:name`, sorted. Raises `SyntaxError`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(overlay_text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "transformers":
            found.update(f"{node.module}:{alias.name}" for alias in node.names)
    return sorted(found)


def _record(table: Mapping[str, Mapping[str, object]]) -> Record:
    names = table["names"]
    for name in names:
        if not _NAME.fullmatch(name):  # it becomes a path below transformers
            raise TypeError(f"{name!r} is no name of a definition in transformers")
    return Record(_seen(table["files"]), {name: _seen(names[name]) for name in names})


def _seen(table: object) -> Seen:
    if not isinstance(table, dict) or not all(isinstance(releases, list) for releases in table.values()):
        raise TypeError(f"expected hashes with lists of releases, found {table!r:.60}")
    return {key: tuple(map(str, releases)) for key, releases in table.items()}


def _entries(seen: Seen) -> Iterator[str]:
    for key, releases in seen.items():
        quoted = ", ".join(f'"{release}"' for release in releases)
        line = f'"{key}" = [{quoted}]'
        if len(line) <= 120:
            yield line
        else:
            yield f'"{key}" = ['
            yield from textwrap.wrap(f"{quoted},", width=116, initial_indent="    ", subsequent_indent="    ")
            yield "]"
