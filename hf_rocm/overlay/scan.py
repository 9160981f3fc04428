"""Read the files of one transformers installation into `FileState`s."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from hf_rocm.errors import OverlayError
from hf_rocm.overlay import block
from hf_rocm.overlay.catalog import MODEL, Catalog, Overlay, release_span
from hf_rocm.overlay.locate import Installation
from hf_rocm.overlay.state import FileState, LeftOut, examine

# What can be done for a model that has no overlay.
WITHOUT_OVERLAY = (
    "hf_rocm.route_linear(model) serves the linear layers of any model; to add a model, see docs/adding-a-model.md"
)


def survey(installation: Installation, catalog: Catalog, models: Iterable[str] = ()) -> list[FileState]:
    """Return the states of the named models' files or, without names, of all files with an overlay or a block.

    Without names, models that the installed transformers lacks are left out. Raises `OverlayError` for a named model
    that it lacks, or that has neither an overlay for this release nor a block.
    """
    names = list(dict.fromkeys(models))
    if not names:
        served = {overlay.model for overlay in catalog.for_release(installation.version)}
        present = {model for model in served if not _absent(installation, model)}
        names = sorted(present | _patched(installation))
    return [state_of(installation, catalog, model, catalog.find(model, installation.version)) for model in names]


def left_out(installation: Installation, catalog: Catalog) -> LeftOut:
    """The models with an overlay that the installed transformers lacks, or that no overlay supports in this release."""
    release = installation.version
    others = {model: catalog.find(model, release) for model in catalog.models()}
    absent = [model for model in others if _absent(installation, model)]
    stock = {
        model: _why_stock(catalog, model, release)
        for model, overlay in others.items()
        if overlay is None and model not in absent
    }
    return LeftOut(tuple(absent), stock)


def read_file(path: Path) -> bytes | None:
    """Return a file's bytes, or None if it does not exist. Raises `OverlayError` if it is not a regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OverlayError(
                f"{path.name} is not a file",
                facts={"file": path, "expected": "a file", "found": "a device, a pipe or a folder"},
                hint="reinstall transformers",
            )
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def state_of(installation: Installation, catalog: Catalog, model: str, overlay: Overlay | None) -> FileState:
    """Return the state of one model's file with respect to this overlay.

    Raises `OverlayError` if the installed transformers lacks the model, or if there is neither an overlay nor a block.
    """
    release = installation.version
    # The name becomes part of a path.
    if not isinstance(model, str) or not MODEL.fullmatch(model):
        raise no_overlay(installation, catalog, model)
    file = _file(installation, model)
    data = read_file(file)
    if data is None and model in catalog.models() and _absent(installation, model):
        raise _no_model(installation, catalog, model)
    if overlay is None and (data is None or not block.has_block(data)):
        raise no_overlay(installation, catalog, model)
    return examine(
        model,
        file,
        release=release,
        overlay=overlay,
        data=data,
        link=_link(file),
        recorded_sha256=installation.recorded_sha256(file),
        ranges=", ".join(catalog.ranges(model)) or "an overlay of this release of hf-rocm",
        find=installation.file,
        read=read_file,
        overlay_of=catalog.by_id,
    )


def _file(installation: Installation, model: str) -> Path:
    return installation.root / "models" / model / f"modeling_{model}.py"


def _link(file: Path) -> Path | None:
    """The first symbolic link among the model's folder, the file and its folder of compiled files, or None."""
    folder = file.parent
    return next((path for path in (folder, file, folder / "__pycache__") if path.is_symlink()), None)


def _absent(installation: Installation, model: str) -> bool:
    """Whether the installed transformers was shipped without the model. False if the file was deleted afterwards."""
    file = _file(installation, model)
    if os.path.lexists(file):
        return False
    return installation.recorded_sha256(file) is None if installation.record else not file.parent.is_dir()


def _patched(installation: Installation) -> set[str]:
    """Models with a block in their file. An earlier release of hf-rocm may have had more overlays than this one."""
    models = set()
    for file in installation.root.glob("models/*/modeling_*.py"):
        if file.name == f"modeling_{file.parent.name}.py" and file.is_file() and block.has_block(file.read_bytes()):
            models.add(file.parent.name)
    return models


def no_overlay(installation: Installation, catalog: Catalog, model: str | None = None) -> OverlayError:
    """Return the error for a release without an overlay (of this model), or for a model that has no overlay at all."""
    release = installation.version
    if model is None or model in catalog.models():
        facts = {
            "file": installation.root / "__init__.py",
            "expected": " or ".join(catalog.ranges(model) or catalog.ranges()),
            "found": release,
        }
        if model is not None and (reason := catalog.leaves_out(model, release)):
            facts["because"] = reason
        return OverlayError(
            f"there is no overlay{f' of {model}' if model else ''} for transformers {release}",
            facts=facts,
            hint="upgrade hf-rocm, or install a release of transformers from that range",
        )
    exists = isinstance(model, str) and MODEL.fullmatch(model) and os.path.lexists(_file(installation, model))
    served = [overlay.model for overlay in catalog.for_release(release)]
    longer = [name for name in served if name.startswith(f"{model}_")]
    examples = (longer or difflib.get_close_matches(str(model), served) or served)[:3]
    return OverlayError(
        f"hf-rocm has no overlay for {model!r}",
        facts={
            "expected": f"one of {len(served)} models, such as {', '.join(examples)}"
            if served
            else "no name: this release of transformers has no overlays",
            "found": model,
            "transformers": f"{release} ({installation.root})",
        },
        hint="omit the name to select every overlay; `hf-rocm status --all` lists them"
        + (f"; {WITHOUT_OVERLAY}" if exists else ""),
    )


def _no_model(installation: Installation, catalog: Catalog, model: str) -> OverlayError:
    releases = catalog.releases(model)
    return OverlayError(
        f"transformers {installation.version} has no model {model}",
        facts={
            "file": _file(installation, model),
            "expected": f"a release that has it: {release_span(releases)}" if releases else "a release that has it",
            "found": installation.version,
        },
        hint="install one of those releases, or omit the name",
    )


def _why_stock(catalog: Catalog, model: str, release: str) -> str:
    ranges = " or ".join(catalog.ranges(model))
    return catalog.leaves_out(model, release) or f"the overlay is for transformers {ranges}"
