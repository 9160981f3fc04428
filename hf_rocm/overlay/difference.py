"""What differs between a file and what its overlay expects, as text that a person can read."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from hf_rocm.errors import OverlayError
from hf_rocm.overlay import block
from hf_rocm.overlay.catalog import release_span
from hf_rocm.overlay.state import FileState, Installed, Match, render


def explain_difference(state: FileState) -> str:
    """The block as a diff (what is installed, what would be, or what was edited), and each changed definition.

    hf-rocm holds no stock sources, so a changed definition is told by its digest and the releases that have others.
    """
    parts = [part for part in (_block_diff(state), _definitions(state)) if part]
    return "\n\n".join(parts) or f"{state.file}: {state.detail}"


def _block_diff(state: FileState) -> str:
    data = state.data or b""
    if state.installed is Installed.EDITED:
        return _against_ours(state)
    if state.installed is Installed.NO:
        return ""
    return _diff(state.stock, data, f"{state.file} (stock)", f"{state.file} (installed)")


def _against_ours(state: FileState) -> str:
    data = state.data or b""
    if state.overlay is None:
        return state.detail
    try:
        ours = render(block.stock_part(data), state.overlay)
    except OverlayError:  # the markers themselves are in disorder
        return state.detail
    return f"{state.detail}\n" + _diff(ours, data, f"{state.file} (as hf-rocm writes it)", f"{state.file} (found)")


def _definitions(state: FileState) -> str:
    return "\n".join(_sentences(state)) if state.match is Match.CHANGED else ""


def _sentences(state: FileState) -> Iterator[str]:
    for difference in state.differences:
        found = f"digest {difference.found}" if difference.found else "not defined"
        yield f"{difference.name} in {difference.file}: {found} in transformers {state.release}"
        for digest, releases in difference.expected.items():
            yield f"  expected digest {digest}, as in transformers {release_span(releases)}"
    if state.delivered is not None:
        yield f"{state.file} is not the file that transformers {state.release} was delivered with"
        yield f"  expected sha256 {state.delivered}"
        yield f"  found    sha256 {block.sha256(state.stock)}"


def _diff(old: bytes, new: bytes, old_name: str, new_name: str) -> str:
    lines = difflib.unified_diff(_lines(old), _lines(new), old_name, new_name, lineterm="")
    return "\n".join(lines)


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", errors="replace").splitlines()
