"""An overlay directory's `manifest.toml`: which releases it covers, and the digests that were seen in them.

    transformers = ">=5.4,<6"
    releases = ["5.4.0", "5.5.0", …]

    [llama.files]
    "<sha256 of a whole stock file>" = ["5.4.0"]

    [llama.names."transformers.models.llama.modeling_llama:LlamaMLP"]
    "<digest of that definition>" = ["5.4.0 to 5.7.1", "5.9.0"]

    [gemma2]
    transformers = ">=5.5"
    reason = "what is said of the releases that this leaves out of the directory's range"

The names are what the overlay's text imports from transformers: its import list is its dependency list. A span counts
the releases of the list at the top. A person writes the ranges and the reasons, scripts/refresh-digests all else.
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

_NAME = re.compile(r"transformers(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_SPAN = " to "
_LIMIT = {"transformers", "reason"}  # what a person writes into a model's table
Seen = Mapping[str, tuple[str, ...]]  # a hash or digest → the releases where it was seen


@dataclass(frozen=True)
class Record:
    """What was seen of one model: hashes of its whole file, and digests of each name that its overlay needs."""

    files: Seen = field(default_factory=dict)
    names: Mapping[str, Seen] = field(default_factory=dict)

    def releases(self) -> set[str]:
        return {release for releases in self.files.values() for release in releases}


@dataclass(frozen=True)
class Limit:
    """A model's own range within its directory's, and why the other releases are left out."""

    transformers: str
    reason: str


@dataclass(frozen=True)
class Manifest:
    """One directory's range of releases (PEP 440), its record of each model, and which have a range of their own."""

    transformers: str
    records: Mapping[str, Record] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)


def parse(text: str, *, source: object) -> Manifest:
    """Read a manifest. Raises `OverlayError` naming the file and what is wrong with it."""
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
    """The manifest as text, equal for equal manifests."""
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
    """What an overlay imports from transformers, as `module:name`, sorted. Raises `SyntaxError`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(overlay_text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "transformers":
            found.update(f"{node.module}:{alias.name}" for alias in node.names)
    return sorted(found)


def _record(table: Mapping[str, Mapping[str, object]], known: list[str]) -> Record:
    names = table.get("names", {})  # an overlay that imports nothing leans on nothing
    for name in names:
        if not _NAME.fullmatch(name):  # it becomes a path below transformers
            raise TypeError(f"{name!r} is no name of a definition in transformers")
    return Record(_seen(table["files"], known), {name: _seen(names[name], known) for name in names})


def _limit(table: Mapping[str, object]) -> Limit:
    return Limit(_string(table["transformers"]), _string(table["reason"]))


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {value!r:.60}")
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
    """Runs of three and more neighbours as one item."""
    places = sorted(known.index(release) for release in releases)
    # neighbours keep the difference between their place and their rank
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
        # a span is one word to the wrapping
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
