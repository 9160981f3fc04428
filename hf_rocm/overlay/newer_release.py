"""Assess, file by file, a transformers release that is newer than all releases with which this hf-rocm was checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hf_rocm import __version__
from hf_rocm.overlay.catalog import Catalog, Overlay, newest_if_older, release_span
from hf_rocm.overlay.locate import Installation
from hf_rocm.overlay.scan import left_out, state_of
from hf_rocm.overlay.state import LISTED, FileState, Installed, Match


@dataclass(frozen=True)
class Prospect:
    """One file. go_on: whether its overlay may be used. sentence: the reason, with the file or the changed definitions.

    why: the reason without the file's name; empty if the overlay may not be used.
    """

    model: str
    go_on: bool
    sentence: str
    why: str = ""

    def to_dict(self) -> dict[str, object]:
        return {"model": self.model, "go_on": self.go_on, "sentence": self.sentence}


@dataclass(frozen=True)
class Outlook:
    """The assessment of a newer release. newest: the newest checked release. prospects: one for every selected file."""

    release: str
    newest: str
    prospects: tuple[Prospect, ...]

    @property
    def verdict(self) -> str:
        """One sentence: whether the overlays can be used with this release."""
        usable = [prospect.model for prospect in self.prospects if prospect.go_on]
        others = [prospect.model for prospect in self.prospects if not prospect.go_on]
        if not others:
            return "proceed: every selected overlay can be used with it"
        advice = f"stay on transformers {self.newest}, or upgrade hf-rocm"
        if not usable:
            return f"do not proceed: no overlay can be used with it, so models stay stock; {advice}"
        return f"proceed with {_counted(usable)}; {_counted(others)} would stay stock: if you need these, {advice}"

    def to_dict(self) -> dict[str, object]:
        return {
            "newest_checked": self.newest,
            "verdict": self.verdict,
            "files": [prospect.to_dict() for prospect in self.prospects],
        }


def outlook(installation: Installation, catalog: Catalog, models: Iterable[str] = ()) -> Outlook | None:
    """Assess these models or, if none is named, all models with an overlay that this release of transformers contains.

    Returns None if the release is not newer than all checked ones. Raises `OverlayError` for a named model that has an
    overlay but is not in this release of transformers.
    """
    checked = {release for overlay in _newest_overlays(catalog) for release in overlay.record.releases()}
    newest = newest_if_older(checked, installation.version)
    if newest is None:
        return None
    named = set(models)
    selected = named or set(catalog.models()) - set(left_out(installation, catalog).absent)
    overlays = [overlay for overlay in _newest_overlays(catalog) if overlay.model in selected]
    prospects = [_prospect(state_of(installation, catalog, overlay.model, overlay), catalog) for overlay in overlays]
    return Outlook(installation.version, newest, tuple(prospects))


def _prospect(state: FileState, catalog: Catalog) -> Prospect:
    assert state.overlay is not None
    known = release_span(state.overlay.record.releases())
    if state.data is None:
        return Prospect(state.model, False, f"{state.file.name} is gone")
    if state.differences:
        names = ", ".join(difference.name for difference in state.differences)
        digests = "; ".join(
            f"{change.name} is {f'{change.digest} here' if change.digest else 'gone'}, {_seen(change.expected)}"
            for change in state.differences
        )
        return Prospect(state.model, False, f"upstream changed {names}, which its overlay needs ({digests})")
    if state.match is Match.CHANGED or state.installed is Installed.EDITED:
        return Prospect(state.model, False, f"{state.file.name} was edited here: {state.detail}")
    verified = state.match is Match.VERIFIED
    status = "is known" if verified else f"is new, but every definition that its overlay needs is as in {known}"
    if catalog.find(state.model, state.release) is None:
        range_ = f"hf-rocm {__version__} supports {state.overlay.requires}"
        return Prospect(state.model, False, f"{state.file.name} {status}; still, {range_} and refuses other releases")
    alike = "is new, but every definition that its overlay needs is known"
    return Prospect(state.model, True, f"{state.file.name} {status}", status if verified else alike)


def _counted(models: list[str]) -> str:
    return ", ".join(models) if len(models) <= LISTED else f"{len(models)} models"


def _seen(expected: Iterable[str]) -> str:
    return f"expected {' or '.join(expected)}"


def _newest_overlays(catalog: Catalog) -> list[Overlay]:
    overlays = (catalog.newest(model) for model in catalog.models())
    return [overlay for overlay in overlays if overlay is not None]
