"""What to make of a transformers that is newer than any that this hf-rocm was checked with: file by file, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from hf_rocm import __version__
from hf_rocm.overlay.catalog import Catalog, Overlay, release_span
from hf_rocm.overlay.locate import Installation
from hf_rocm.overlay.state import FileState, Installed, Match
from hf_rocm.overlay.survey import left_out, state_of

_LISTED = 8  # names that a sentence can carry


@dataclass(frozen=True)
class Prospect:
    """One file. go_on: its overlay may be used; sentence: why, or why not; why: the same of any file that is alike."""

    model: str
    go_on: bool
    sentence: str
    why: str = ""

    def to_dict(self) -> dict[str, object]:
        return {"model": self.model, "go_on": self.go_on, "sentence": self.sentence}


@dataclass(frozen=True)
class Outlook:
    """A newer release: what was the newest that was checked, and what became of each file since."""

    release: str
    newest: str
    prospects: tuple[Prospect, ...]

    @property
    def verdict(self) -> str:
        """One sentence that says whether to go on."""
        usable = [prospect.model for prospect in self.prospects if prospect.go_on]
        others = [prospect.model for prospect in self.prospects if not prospect.go_on]
        if not others:
            return "go on: every overlay that was asked for can be used with it"
        stay = f"stay on transformers {self.newest}, or upgrade hf-rocm"
        if not usable:
            return f"don't go on: no overlay can be used with it, and models stay stock; {stay}"
        names = ", ".join(usable) if len(usable) <= _LISTED else f"{len(usable)} models"
        return f"go on with {names}; {', '.join(others)} would stay stock: if you need it, {stay}"

    def to_dict(self) -> dict[str, object]:
        return {
            "newest_checked": self.newest,
            "verdict": self.verdict,
            "files": [prospect.to_dict() for prospect in self.prospects],
        }


def outlook(installation: Installation, catalog: Catalog, models: Iterable[str] = ()) -> Outlook | None:
    """The outlook for these models (none named: all); None if the release is not newer than those that were checked."""
    newest = _newest(release for overlay in _newest_overlays(catalog) for release in overlay.record.releases())
    if newest is None or not _newer(installation.version, newest):
        return None
    named = set(models)
    wanted = named or set(catalog.models()) - set(left_out(installation, catalog).absent)
    overlays = [overlay for overlay in _newest_overlays(catalog) if overlay.model in wanted]
    prospects = [_prospect(state_of(installation, catalog, each.model, each), catalog) for each in overlays]
    return Outlook(installation.version, newest, tuple(prospects))


def _prospect(state: FileState, catalog: Catalog) -> Prospect:
    assert state.overlay is not None
    known = release_span(state.overlay.record.releases())
    if state.data is None:
        return Prospect(state.model, False, f"{state.file.name} is gone")
    if state.differences:
        names = ", ".join(difference.name for difference in state.differences)
        digests = "; ".join(
            f"{each.name} is {f'{each.found} here' if each.found else 'gone'}, {_seen(each.expected)}"
            for each in state.differences
        )
        return Prospect(state.model, False, f"upstream changed {names}, which its overlay needs ({digests})")
    if state.match is Match.CHANGED or state.installed is Installed.EDITED:
        return Prospect(state.model, False, f"{state.file.name} was edited here: {state.detail}")
    verified = state.match is Match.VERIFIED
    what = "is a known file" if verified else f"is new, but every definition that its overlay needs is as in {known}"
    if catalog.find(state.model, state.release) is None:
        range_ = f"hf-rocm {__version__} is made for {state.overlay.requires}"
        return Prospect(state.model, False, f"{state.file.name} {what}; still, {range_} and refuses other releases")
    alike = "is new, but every definition that its overlay needs is a known one"
    return Prospect(state.model, True, f"{state.file.name} {what}", what if verified else alike)


def _seen(expected: Iterable[str]) -> str:
    return f"known are {' and '.join(expected)}"


def _newest_overlays(catalog: Catalog) -> list[Overlay]:
    found = (catalog.newest(model) for model in catalog.models())
    return [overlay for overlay in found if overlay is not None]


def _newest(releases: Iterable[str]) -> str | None:
    ordered: Sequence[str] = sorted(releases, key=Version)
    return ordered[-1] if ordered else None


def _newer(release: str, newest: str) -> bool:
    try:
        return Version(release) > Version(newest)
    except InvalidVersion:
        return False
