"""An overlay directory's `manifest.toml`: the releases that it covers, and the digests recorded in them.

    transformers = ">=5.4,<6"
    releases = ["5.4.0", "5.5.0", …]

    [llama.files]
    "<sha256 of a whole stock file>" = ["5.4.0"]

    [llama.names."transformers.models.llama.modeling_llama:LlamaMLP"]
    "<digest of that definition>" = ["5.4.0 to 5.7.1", "5.9.0"]

    [gemma2]
    transformers = ">=5.5"
    reason = "why this model excludes releases of the directory's range"

The names are the imports from transformers in the overlay's source: its import list is its dependency list. `A|B` is
the first of the names passed to `overlay.binds_first` that exists in a release. A span such as `5.4.0 to 5.7.1` refers
to the list of releases at the top. Ranges and reasons are written manually. scripts/refresh-digests writes everything
else.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from packaging.version import Version

from hf_rocm.errors import OverlayError
from hf_rocm.overlay.digest import EITHER

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_PATH = rf"{_WORD}(\.{_WORD})*"
_NAME = re.compile(rf"transformers(\.{_WORD})*:{_PATH}(\|{_PATH})*")
_SPAN = " to "
# The manually written keys of a model's table.
_LIMIT = {"transformers", "reason"}
# hash or digest → the releases that have it
Seen = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Record:
    """The record of one model: hashes of its whole file, and digests of all names that its overlay needs."""

    files: Seen = field(default_factory=dict)
    names: Mapping[str, Seen] = field(default_factory=dict)

    def releases(self) -> set[str]:
        return {release for releases in self.files.values() for release in releases}


@dataclass(frozen=True)
class Limit:
    """A model's own range within that of its directory, and the reason why the other releases are excluded."""

    transformers: str
    reason: str


@dataclass(frozen=True)
class Manifest:
    """A directory's range of releases (PEP 440), the records of its models, and the models' own ranges."""

    transformers: str
    records: Mapping[str, Record] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)


def parse(text: str, *, source: object) -> Manifest:
    """Parse a manifest. Raises `OverlayError` with the file and the cause."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data = tomllib.loads(text)
        requires = _string(data.pop("transformers"))
        known = list(map(str, data.pop("releases", [])))
        limits = {model: _limit(table) for model, table in data.items() if "transformers" in table}
        records = {model: _record(table, known) for model, table in data.items() if set(table) - _LIMIT}
        return Manifest(requires, records, limits)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise OverlayError(
            "an overlay manifest can't be read",
            facts={"file": source, "found": f"{type(error).__name__}: {error}"},
            hint="reinstall hf-rocm",
        ) from error


def render(manifest: Manifest) -> str:
    """Format a manifest. The text does not depend on the order of the models and names."""
    known = sorted({release for record in manifest.records.values() for release in record.releases()}, key=Version)
    lines = [f"transformers = {_quoted(manifest.transformers)}", *(_listed("releases", known) if known else ())]
    for model in sorted({*manifest.records, *manifest.limits}):
        if (limit := manifest.limits.get(model)) is not None:
            lines += ["", f"[{model}]", f"transformers = {_quoted(limit.transformers)}"]
            lines += [f"reason = {_quoted(limit.reason)}"]
        if (record := manifest.records.get(model)) is not None:
            lines += ["", f"[{model}.files]", *_entries(record.files, known)]
            for name, seen in sorted(record.names.items()):
                lines += ["", f'[{model}.names."{name}"]', *_entries(seen, known)]
    return "\n".join(lines) + "\n"


def dependencies(overlay_text: str) -> list[str]:
    """Return the names that an overlay imports from transformers or passes to `overlay.binds_first`, sorted.

    An imported name has the form `module:name`, and the names of one call have the form `module:name|name`. Raises
    `SyntaxError` if the overlay is not valid Python.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(overlay_text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "transformers":
            names.update(f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "overlay.binds_first":
            module = ast.literal_eval(node.args[0])
            names.add(f"{module}:{EITHER.join(str(keyword.arg) for keyword in node.keywords)}")
    return sorted(names)


def _record(table: Mapping[str, Mapping[str, object]], known: list[str]) -> Record:
    # An overlay that imports nothing depends on nothing.
    names = table.get("names", {})
    for name in names:
        # The name becomes a path below transformers.
        if not _NAME.fullmatch(name):
            raise TypeError(f"{name!r} is not the name of a definition in transformers")
    return Record(_seen(table["files"], known), {name: _seen(names[name], known) for name in names})


def _limit(table: Mapping[str, object]) -> Limit:
    return Limit(_string(table["transformers"]), _string(table["reason"]))


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found {value!r:.60}")
    return value


def _seen(table: object, known: list[str]) -> Seen:
    if not isinstance(table, dict) or not all(isinstance(releases, list) for releases in table.values()):
        raise TypeError(f"expected hashes with lists of releases, found {table!r:.60}")
    return {key: tuple(_expanded(map(str, releases), known)) for key, releases in table.items()}


def _expanded(items: Iterable[str], known: list[str]) -> Iterator[str]:
    for item in items:
        first, span, last = item.partition(_SPAN)
        if span:
            yield from known[known.index(first) : known.index(last) + 1]
        else:
            yield item


def _entries(seen: Seen, known: list[str]) -> Iterator[str]:
    for key, releases in seen.items():
        yield from _listed(f'"{key}"', list(_spans(releases, known)))


def _spans(releases: Iterable[str], known: list[str]) -> Iterator[str]:
    """Join runs of three or more consecutive releases into one item."""
    places = sorted(known.index(release) for release in releases)
    # in a run of consecutive releases, index minus rank is constant
    for _, run in itertools.groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        names = [known[place] for _, place in run]
        yield from [f"{names[0]}{_SPAN}{names[-1]}"] if len(names) > 2 else names


def _listed(key: str, items: Iterable[str]) -> Iterator[str]:
    quoted = ", ".join(map(_quoted, items))
    whole = f"{key} = [{quoted}]"
    if len(whole) <= 120:
        yield whole
    else:
        yield f"{key} = ["
        # protect the spaces of a span from wrapping
        wrapped = textwrap.wrap(
            f"{quoted},".replace(_SPAN, _SPAN.replace(" ", "\0")),
            width=116,
            initial_indent="    ",
            subsequent_indent="    ",
        )
        yield from (line.replace("\0", " ") for line in wrapped)
        yield "]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
