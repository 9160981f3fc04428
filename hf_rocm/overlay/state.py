"""The state of a stock file on two axes: whether the block is installed, and whether the overlay matches the file.

Nothing here reads transformers' files: `scan.state_of` passes the bytes, and the functions that read other files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from hf_rocm import __version__
from hf_rocm.errors import DigestMismatch, OverlayError
from hf_rocm.overlay import block
from hf_rocm.overlay.catalog import Overlay, newest_if_older, release_span
from hf_rocm.overlay.digest import digests
from hf_rocm.overlay.manifest import Seen


class Installed(str, Enum):
    """Whether the block is in the file."""

    NO = "no"
    YES = "yes"
    # Intact, but this release of hf-rocm would write a different one or none.
    OLD = "old"
    # Intact and labelled with this release of hf-rocm, but its code is not that of the overlay.
    FOREIGN = "foreign"
    # The block, or the stock part above it, was changed after the block was written.
    EDITED = "edited"


class Match(str, Enum):
    """Whether the overlay supports the stock part of the file."""

    # The same file as in a verified release.
    VERIFIED = "verified"
    # Every definition that the overlay depends on is known.
    COMPATIBLE = "compatible"
    # A definition differs, the file differs from the one in its package, or there is no file.
    CHANGED = "changed"
    # There is no overlay for this release.
    UNSUPPORTED = "unsupported"


GOOD = (Match.VERIFIED, Match.COMPATIBLE)
# Longer lists of names and of files are shortened.
LISTED = 8


@dataclass(frozen=True)
class Difference:
    """One definition whose digest the overlay does not expect. digest: the actual one; None if it does not exist."""

    name: str
    file: Path
    digest: str | None
    expected: Seen

    def to_dict(self) -> dict[str, object]:
        expected = {digest: list(releases) for digest, releases in self.expected.items()}
        return {"name": self.name, "file": str(self.file), "found": self.digest, "expected": expected}


@dataclass(frozen=True)
class FileState:
    """The state of one stock file.

    data: the file's bytes, None if it does not exist. stock: the bytes without the block. delivered: the hash of the
    file as its release delivered it, if the stock part differs. link: the path that is a symbolic link, if any: the
    file, its folder, or the folder of its compiled files.
    """

    model: str
    file: Path
    release: str
    overlay: Overlay | None
    data: bytes | None
    stock: bytes
    installed: Installed
    match: Match
    detail: str = ""
    differences: tuple[Difference, ...] = ()
    written: block.Split | None = None
    delivered: str | None = None
    link: Path | None = None

    @property
    def good(self) -> bool:
        """Whether the file needs no attention: it has no block, or the current block and a matching stock part."""
        return self.installed is Installed.NO or (self.installed is Installed.YES and self.match in GOOD)

    @property
    def root(self) -> Path:
        """The transformers package that contains the file."""
        return self.file.parents[2]

    @property
    def outgrown(self) -> bool:
        """Whether a definition that the overlay needs differs, and the file is not known to be edited."""
        return self.match is Match.CHANGED and bool(self.differences) and self.delivered is None

    @property
    def skippable(self) -> bool:
        """Whether `skip_changed` may skip the file: it is outgrown, or it exists, has no block and is `CHANGED`."""
        unpatched = self.installed is Installed.NO and self.data is not None
        return self.outgrown or (self.match is Match.CHANGED and unpatched)

    @property
    def newest_checked(self) -> str | None:
        """The newest release that the overlay was checked with, if this release is newer, else None."""
        return newest_if_older(self.overlay.record.releases(), self.release) if self.overlay else None

    def rendered(self) -> bytes:
        """The file with this release's block."""
        assert self.overlay is not None
        return render(self.stock, self.overlay)

    def mismatch(self) -> OverlayError | None:
        """Return an error if the overlay must not be used with this file, in memory or on disk, else None."""
        if self.match in GOOD:
            return None
        if self.data is None:
            return OverlayError(
                f"transformers {self.release} has no {self.file.name}",
                facts={"file": self.file, "expected": "a file", "found": "none"},
                hint=self.reinstall(),
            )
        if self.match is Match.UNSUPPORTED:
            return OverlayError(
                f"there is no overlay of {self.model} for transformers {self.release}",
                facts={"file": self.file, "expected": self.detail, "found": self.release},
                hint="upgrade hf-rocm, or install a release of transformers from that range",
            )
        return self._changed()

    def reinstall(self) -> str:
        return f"reinstall transformers: pip install --force-reinstall --no-deps transformers=={self.release}"

    def _matching(self) -> str:
        newest = None if self.delivered else self.newest_checked
        return f"install a release that hf-rocm was checked with: {pip(newest)}" if newest else self.reinstall()

    def _changed(self) -> DigestMismatch:
        cause = "edited" if self.delivered else "edited, or a newer release"
        if not self.differences:
            return DigestMismatch(
                f"{self.file.name} differs from the file in transformers {self.release}",
                facts={
                    "file": self.file,
                    "expected": f"sha256 {self.delivered}",
                    "found": f"sha256 {block.sha256(self.stock)} ({cause})",
                },
                hint=self.reinstall(),
            )
        first = self.differences[0]
        rest = f" (and {len(self.differences) - 1} more)" if len(self.differences) > 1 else ""
        return DigestMismatch(
            f"{first.file.name} is not a file that this overlay was made for",
            facts={
                "file": first.file,
                "expected": f"{first.name}{rest} as in transformers {describe(first.expected)}",
                "found": f"digest {first.digest} ({cause})" if first.digest else f"no such definition ({cause})",
            },
            hint=f"{self._matching()}, or run `hf-rocm status --diff {self.model}`",
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "model": self.model,
            "file": str(self.file),
            "overlay": self.overlay.id if self.overlay else None,
            "installed": self.installed.value,
            "match": self.match.value,
            "detail": self.detail,
            "differences": [difference.to_dict() for difference in self.differences],
            "written_by": self.written.version if self.written else None,
        }


@dataclass(frozen=True)
class LeftOut:
    """Models with an overlay that is not used with the installed transformers.

    absent: models that transformers lacks. stock: models that no overlay supports in this release, or whose changed
    files `skip_changed` skips, with the reason.
    """

    absent: tuple[str, ...] = ()
    stock: Mapping[str, str] = field(default_factory=dict)

    def sentences(self, release: str) -> list[str]:
        """Return one line about the absent models, and one line per reason. Omits details if there are many reasons."""
        count = len(self.absent)
        subject = "1 model with an overlay is" if count == 1 else f"{count} models with an overlay are"
        absent = [f"{subject} not in transformers {release}"] if count else []
        by_reason: dict[str, list[str]] = {}
        brief = len(set(self.stock.values())) > LISTED
        for model, reason in self.stock.items():
            by_reason.setdefault(reason.partition(": ")[0] if brief else reason, []).append(model)
        return absent + [
            f"{some(models)} {'stays' if len(models) == 1 else 'stay'} stock: {reason}"
            for reason, models in by_reason.items()
        ]

    def to_dict(self) -> dict[str, object]:
        return {"absent": list(self.absent), "stock": dict(self.stock)}


def some(names: Sequence[str]) -> str:
    """List at most `LISTED` names: `bert, …, llama and 96 more`."""
    rest = len(names) - LISTED
    return f"{', '.join(names[:LISTED])} and {rest} more" if rest > 0 else ", ".join(names)


def the_others(count: int) -> str:
    """`the other file`, or for example `the other 3 files`."""
    return "the other file" if count == 1 else f"the other {count} files"


def pip(release: str) -> str:
    return f"pip install transformers=={release}"


def render(stock: bytes, overlay: Overlay) -> bytes:
    return block.render(stock, overlay=overlay.id, version=__version__, text=overlay.text)


def describe(seen: Seen) -> str:
    """Format digests: `5.4.0–5.23.0 (digest 3f9a…)`."""
    return (
        ", or ".join(f"{release_span(releases)} (digest {digest})" for digest, releases in seen.items()) or "no release"
    )


def examine(
    model: str,
    file: Path,
    *,
    release: str,
    overlay: Overlay | None,
    data: bytes | None,
    link: Path | None = None,
    recorded_sha256: str | None = None,
    ranges: str = "a supported release",
    find: Callable[[str], Path],
    read: Callable[[Path], bytes | None],
    overlay_of: Callable[[str], Overlay | None] = lambda identity: None,
) -> FileState:
    """Determine the state of one file.

    recorded_sha256: the hash that the package manager recorded. find: returns a module's file. read: returns a file's
    bytes. overlay_of: returns the overlay with a given id.
    """
    installed, written, edited = of_block(data, overlay, overlay_of)
    stock = written.stock if written else block.stock_part(data or b"")
    state = FileState(
        model, file, release, overlay, data, stock, installed, Match.UNSUPPORTED, written=written, link=link
    )
    if overlay is None:
        return replace(state, detail=edited or ranges)
    if data is None:
        return replace(state, match=Match.CHANGED, detail="the file is missing")
    actual = block.sha256(stock)
    known = overlay.record.files.get(actual)
    delivered = None if known else _as_delivered(overlay, release, recorded_sha256)
    differences = _differences(overlay, state, known=known is not None, find=find, read=read)
    if differences:
        names = ", ".join(difference.name for difference in differences)
        match, detail = Match.CHANGED, f"{names} {'differs' if len(differences) == 1 else 'differ'}"
    elif delivered not in (None, actual):
        match, detail = Match.CHANGED, f"differs from the file in transformers {release}"
    elif known:
        match, detail = Match.VERIFIED, f"as in {release_span(known)}"
    else:
        match, detail = Match.COMPATIBLE, "a new file; every definition that the overlay depends on is known"
    delivered = delivered if delivered != actual else None
    return replace(state, match=match, detail=edited or detail, differences=differences, delivered=delivered)


def of_block(
    data: bytes | None, overlay: Overlay | None, overlay_of: Callable[[str], Overlay | None]
) -> tuple[Installed, block.Split | None, str]:
    """Return the state of the block, the parts of the file, and the reason if the block is edited or foreign.

    overlay: the expected overlay. overlay_of: returns the overlay with a given id. A block whose header names this
    release of hf-rocm must have exactly the code of the overlay that the header names, because anyone can write a
    block with a valid hash.
    """
    try:
        parts = block.split(data or b"")
    except OverlayError as error:
        return Installed.EDITED, None, error.message
    if parts is None:
        return Installed.NO, None, ""
    if overlay is not None and render(parts.stock, overlay) == data:
        return Installed.YES, parts, ""
    if parts.version == __version__:
        named = overlay_of(parts.overlay)
        if named is None or render(parts.stock, named) != data:
            return Installed.FOREIGN, parts, f"its code is not that of hf-rocm {__version__}'s {parts.overlay}"
    return Installed.OLD, parts, ""


def _as_delivered(overlay: Overlay, release: str, recorded_sha256: str | None) -> str | None:
    """The hash that the stock part has unless it was edited, or None if this hash is unknown."""
    if recorded_sha256 is not None:
        return recorded_sha256
    return next((sha256 for sha256, releases in overlay.record.files.items() if release in releases), None)


def _differences(
    overlay: Overlay,
    state: FileState,
    *,
    known: bool,
    find: Callable[[str], Path],
    read: Callable[[Path], bytes | None],
) -> tuple[Difference, ...]:
    differing = []
    for module, names in _by_module(overlay.record.names).items():
        own = module == overlay.module
        if own and known:
            # The whole file is known.
            continue
        file = state.file if own else find(module)
        actual = _digests(state.stock if own else block.stock_part(read(file) or b""), names)
        for name, expected in names.items():
            if actual[name] not in expected:
                differing.append(Difference(name, file, actual[name], expected))
    return tuple(differing)


def _by_module(names: Mapping[str, Seen]) -> dict[str, dict[str, Seen]]:
    grouped: dict[str, dict[str, Seen]] = {}
    for qualified, seen in names.items():
        module, _, name = qualified.partition(":")
        grouped.setdefault(module, {})[name] = seen
    return grouped


def _digests(source: bytes, names: Mapping[str, Seen]) -> dict[str, str | None]:
    try:
        return digests(source, names)
    except (SyntaxError, ValueError):
        # Not valid Python, so it has no definitions.
        return dict.fromkeys(names)
