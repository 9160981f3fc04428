"""The overlays of this release of hf-rocm, and the selection of one for a model and a release of transformers."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from hf_rocm.errors import OverlayError
from hf_rocm.overlay import manifest
from hf_rocm.overlay.integrity import check_delivered
from hf_rocm.overlay.manifest import Manifest, Record

_PREFIX = "transformers-"
# Valid names of model folders; no path separators.
MODEL = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True)
class Overlay:
    """One overlay: the text for one stock modeling file in a range of releases."""

    model: str
    directory: str
    path: Path
    requires: str
    record: Record

    @property
    def id(self) -> str:
        return f"{self.directory}/{self.model}"

    @property
    def module(self) -> str:
        """The stock module that the overlay is for."""
        return f"transformers.models.{self.model}.modeling_{self.model}"

    @cached_property
    def text(self) -> str:
        """The text to append. Raises `OverlayError` if it is not valid Python."""
        try:
            text = self.path.read_bytes().decode()
            compile(text, str(self.path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise OverlayError(
                f"overlay {self.id} is not valid Python",
                facts={"file": self.path, "found": error},
                hint="reinstall hf-rocm",
            ) from error
        return text


@dataclass(frozen=True)
class Directory:
    """One `overlays/transformers-*` directory."""

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def files(self) -> dict[str, Path]:
        """Every overlay file of this directory, by model."""
        files = {}
        for path in sorted(self.path.glob("models/*/modeling_*.py")):
            model = path.parent.name
            ordinary = stat.S_ISREG(path.lstat().st_mode) and not path.parent.is_symlink()
            if MODEL.fullmatch(model) and path.name == f"modeling_{model}.py" and ordinary:
                files[model] = path
        return files

    def overlay(self, model: str) -> Overlay | None:
        """The overlay of a model, or None if no digests are recorded: the stock file can't be checked then."""
        record = self.manifest.records.get(model)
        if record is None:
            return None
        return Overlay(model, self.name, self.files[model], self.requires(model), record)

    def requires(self, model: str) -> str:
        """The releases (PEP 440) that this directory's overlay of a model is for."""
        limit = self.manifest.limits.get(model)
        return f"{self.manifest.transformers},{limit.transformers}" if limit else self.manifest.transformers

    def covers(self, release: str, model: str | None = None) -> bool:
        """Whether the release is in this directory's range and, if a model is given, in the model's own range."""
        return _within(release, self.requires(model) if model else self.manifest.transformers)


class Catalog:
    """All overlay directories under one root, oldest first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directories = sorted(_directories(root), key=lambda directory: _first_release(directory.path))

    def models(self) -> list[str]:
        """Every model for which a directory has an overlay."""
        return sorted({model for directory in self.directories for model in directory.files})

    def serving(self, model: str, release: str) -> Directory | None:
        """The newest directory that has the model and covers the release, or None."""
        for directory in reversed(self.directories):
            if model in directory.files and directory.covers(release, model):
                return directory
        return None

    def leaves_out(self, model: str, release: str) -> str | None:
        """Return the reason if the model excludes this release although its directory covers the release; else None."""
        for directory in reversed(self.directories):
            if model in directory.files and directory.covers(release):
                limit = directory.manifest.limits.get(model)
                return limit.reason if limit and not directory.covers(release, model) else None
        return None

    def releases(self, model: str) -> list[str]:
        """All releases for which the model's digests are recorded, oldest first."""
        records = (directory.manifest.records.get(model) for directory in self.directories)
        return sorted({release for record in records if record for release in record.releases()}, key=Version)

    def find(self, model: str, release: str) -> Overlay | None:
        """The overlay that serves a model in this release, or None."""
        directory = self.serving(model, release)
        return directory.overlay(model) if directory else None

    def by_id(self, identity: str) -> Overlay | None:
        """The overlay with this id, such as `transformers-5.4/llama`, or None."""
        name, _, model = identity.partition("/")
        directory = next((d for d in self.directories if d.name == name and model in d.files), None)
        return directory.overlay(model) if directory else None

    def for_release(self, release: str) -> list[Overlay]:
        """All overlays that serve this release, sorted by model."""
        overlays = (self.find(model, release) for model in self.models())
        return [overlay for overlay in overlays if overlay is not None]

    def newest(self, model: str) -> Overlay | None:
        """The overlay of a model for the newest releases that have one, whichever release is installed; or None."""
        return next((d.overlay(model) for d in reversed(self.directories) if model in d.files), None)

    def ranges(self, model: str | None = None) -> list[str]:
        """The ranges of releases that are covered, for one model or for all."""
        covered = [d for d in self.directories if model is None or model in d.files]
        return list(dict.fromkeys(d.requires(model) if model else d.manifest.transformers for d in covered))


def load(root: Path | None = None, *, checked: bool = True) -> Catalog:
    """Load the overlays of the imported hf_rocm: its package data, or a checkout's `overlays/`.

    root: load the overlays of this folder instead, unchecked. checked: raise `OverlayError` if the files differ from
    the package manager's record of hf-rocm. Uninstalling and deactivating do not check.
    """
    if root is not None:
        return Catalog(root)
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_overlays", package.parent / "overlays"):
        if candidate.is_dir():
            if checked:
                check_delivered(candidate)
            return Catalog(candidate)
    raise OverlayError(
        "hf-rocm was installed without its overlays",
        facts={"expected": package / "_overlays"},
        hint="reinstall hf-rocm",
    )


def newest_if_older(releases: Iterable[str], release: str) -> str | None:
    """Return the newest of these releases if `release` is newer than all of them, else None."""
    newest = max(releases, key=Version, default=None)
    try:
        return newest if newest is not None and Version(release) > Version(newest) else None
    except InvalidVersion:
        return None


def release_span(releases: Iterable[str]) -> str:
    """Format releases: `5.4.0–5.23.0`, a single release, or `no release`."""
    ordered = sorted(releases, key=Version)
    if not ordered:
        return "no release"
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]}–{ordered[-1]}"


def _directories(root: Path) -> Iterator[Directory]:
    for path in root.glob(f"{_PREFIX}*"):
        file = path / "manifest.toml"
        if not file.is_file():
            continue
        parsed = manifest.parse(file.read_text(encoding="utf-8"), source=file)
        try:
            for requires in (parsed.transformers, *(limit.transformers for limit in parsed.limits.values())):
                SpecifierSet(requires)
            _first_release(path)
        except (InvalidSpecifier, InvalidVersion) as error:
            raise OverlayError(
                "an overlay directory has no valid range of releases",
                facts={"file": file, "found": error},
                hint="reinstall hf-rocm",
            ) from error
        yield Directory(path, parsed)


@cache
def _within(release: str, requires: str) -> bool:
    try:
        # nightlies and local builds are allowed, because stock files are matched by content, not by version
        return Version(release) in SpecifierSet(requires, prereleases=True)
    except InvalidVersion:
        return False


def _first_release(path: Path) -> Version:
    return Version(path.name.removeprefix(_PREFIX))
