"""Describe the differences between a file and what its overlay expects, as readable text."""

from __future__ import annotations

import ast
import difflib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from hf_rocm.errors import OverlayError
from hf_rocm.overlay import block
from hf_rocm.overlay.catalog import release_span
from hf_rocm.overlay.digest import digests
from hf_rocm.overlay.state import FileState, Installed, Match, render


def explain_difference(state: FileState) -> str:
    """Return the block as a diff (installed or edited), and a description of every changed definition.

    If there is neither, return the file's path and the detail of its state. hf-rocm does not contain transformers'
    sources, so a changed definition is described by its digest and the recorded digests.
    """
    parts = [part for part in (_block_diff(state), _definitions(state)) if part]
    return "\n\n".join(parts) or f"{state.file}: {state.detail}"


def explain_change(state: FileState, reference: Path) -> str:
    """Return every changed definition as a diff against another release's text.

    reference: a wheel of transformers, the package's folder or its parent folder. Raises `OverlayError` if the
    reference lacks a file.
    """
    parts = []
    for difference in state.differences:
        path = Path("transformers", difference.file.relative_to(state.root)).as_posix()
        known = block.stock_part(_member(reference, path))
        actual = block.stock_part(difference.file.read_bytes()) if difference.file.is_file() else b""
        old, new = _definition(known, difference.name), _definition(actual, difference.name)
        lines = difflib.unified_diff(
            old, new, f"{reference.name}: {difference.name}", f"{difference.file}: {difference.name}", lineterm=""
        )
        parts.append("\n".join(lines) or f"{difference.name} is the same in {reference.name}")
    return "\n\n".join(parts)


def _member(reference: Path, path: str) -> bytes:
    try:
        if reference.is_dir():
            folder = reference if reference.name == "transformers" else reference / "transformers"
            return folder.with_name("transformers").joinpath(*path.split("/")[1:]).read_bytes()
        with zipfile.ZipFile(reference) as archive:
            return archive.read(path)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise OverlayError(
            "the reference does not contain this file of transformers",
            facts={
                "path": reference,
                "expected": f"a wheel of transformers, or its folder, with {path}",
                "found": error,
            },
            hint="pip download --no-deps transformers==RELEASE, with a release that `hf-rocm status --diff` lists",
        ) from error


def _definition(source: bytes, name: str) -> list[str]:
    """Return the lines of all top-level statements that bind the name."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []
    lines = source.decode("utf-8", errors="replace").splitlines()
    bound: list[str] = []
    for statement in body:
        if digests(ast.unparse(statement), [name])[name] is not None:
            decorators = getattr(statement, "decorator_list", [])
            first = min(node.lineno for node in (statement, *decorators))
            bound += lines[first - 1 : statement.end_lineno]
    return bound


def _block_diff(state: FileState) -> str:
    data = state.data or b""
    if state.installed in (Installed.EDITED, Installed.FOREIGN):
        return _against_overlay(state)
    if state.installed is Installed.NO:
        return ""
    return _diff(state.stock, data, f"{state.file} (stock)", f"{state.file} (installed)")


def _against_overlay(state: FileState) -> str:
    data = state.data or b""
    if state.overlay is None:
        return state.detail
    try:
        written = render(block.stock_part(data), state.overlay)
    except OverlayError:
        # The markers themselves are broken.
        return state.detail
    return f"{state.detail}\n" + _diff(written, data, f"{state.file} (as hf-rocm writes it)", f"{state.file} (found)")


def _definitions(state: FileState) -> str:
    return "\n".join(_sentences(state)) if state.match is Match.CHANGED else ""


def _sentences(state: FileState) -> Iterator[str]:
    for difference in state.differences:
        actual = f"digest {difference.digest}" if difference.digest else "not defined"
        yield f"{difference.name} in {difference.file}: {actual} in transformers {state.release}"
        for digest, releases in difference.expected.items():
            yield f"  expected digest {digest}, as in transformers {release_span(releases)}"
    if state.outgrown:
        known = release_span(next(iter(state.differences[0].expected.values())))
        yield f"to see the change itself, download a known release ({known}) and compare with it:"
        yield "  pip download --no-deps transformers==<release>"
        yield f"  hf-rocm status --diff {state.model} --against transformers-<release>-py3-none-any.whl"
    if state.delivered is not None:
        yield f"{state.file} differs from the file in transformers {state.release}"
        yield f"  expected sha256 {state.delivered}"
        yield f"  found    sha256 {block.sha256(state.stock)}"


def _diff(old: bytes, new: bytes, old_name: str, new_name: str) -> str:
    lines = difflib.unified_diff(_lines(old), _lines(new), old_name, new_name, lineterm="")
    return "\n".join(lines)


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", errors="replace").splitlines()
