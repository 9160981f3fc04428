"""Overlays in memory: the text that the installer would append, executed as a separate module.

`from_pretrained` activates overlays where none are installed, as in notebooks or with read-only site-packages. The
stock files are checked against the same digests first.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType

from hf_rocm import options, patches
from hf_rocm.arguments import require_families
from hf_rocm.errors import OverlayError
from hf_rocm.overlay import bind
from hf_rocm.overlay import catalog as catalogs
from hf_rocm.overlay.catalog import Catalog, Overlay
from hf_rocm.overlay.facts import torch_facts
from hf_rocm.overlay.locate import locate
from hf_rocm.overlay.scan import no_overlay, survey
from hf_rocm.overlay.state import FileState, Installed

_PACKAGE = "hf_rocm._active"
_lock = threading.RLock()


def activate(*models: str, everywhere: bool = True, catalog: Catalog | None = None) -> list[str]:
    """Bind the overlays of these models in this process.

    models: names of model folders such as `llama`; if none is given, all models with an overlay for this release.
    everywhere: True serves every instance of the stock classes, as an installed overlay does, and does nothing without
    ROCm unless `HF_ROCM_FORCE=1` is set. False serves only prepared models, on any machine.
    Checks all files before it binds any class. Returns the bound models, sorted. Raises `DigestMismatch` or
    `OverlayError`; a name without an overlay raises `OverlayError` on every machine.
    """
    require_families(models, "activate")
    idle = everywhere and not (options.force_requested() or _rocm())
    if idle and not models:
        return []
    with _lock:
        states = survey(locate(), catalog or catalogs.load(), models)
        if idle:
            return []
        overlays = [_usable(state) for state in states if models or state.overlay is not None]
        for overlay in overlays:
            bound = _bound_by(_execute(overlay))
            if everywhere:
                for binding in bound:
                    binding.mode = bind.installed_mode()
        return sorted(overlay.model for overlay in overlays)


def deactivate(*models: str) -> list[str]:
    """Restore the forwards of the stock classes of these models, or of all models if none is named.

    Returns the unbound models.
    Raises `OverlayError`, without changing anything, if there is no overlay for one of the names.
    """
    require_families(models, "deactivate")
    with _lock:
        known = {binding.model for binding in bind.bindings()}
        if not known.issuperset(models):
            catalog = catalogs.load(checked=False)
            unknown = next((model for model in models if model not in known.union(catalog.models())), None)
            if unknown is not None:
                raise no_overlay(locate(), catalog, unknown)
        bound = [binding for binding in bind.bindings() if not models or binding.model in models]
        for binding in bound:
            bind.unbind(binding.cls)
        patches.sweep()
        return sorted({binding.model for binding in bound})


def is_active(model: str) -> bool:
    """Whether an overlay of this model was activated in this process and is still bound."""
    bindings = (binding for binding in bind.bindings() if binding.model == model)
    return any("__hf_rocm_activation__" in binding.home for binding in bindings)


def _rocm() -> bool:
    torch = sys.modules.get("torch")
    return (torch_facts().hip if torch is None else torch.version.hip) is not None


def _usable(state: FileState) -> Overlay:
    if state.installed is Installed.EDITED:
        raise OverlayError(
            f"{state.file.name} has been edited since its overlay was installed",
            facts={"file": state.file, "expected": "the stock file, or one that hf-rocm wrote", "found": state.detail},
            hint=state.reinstall(),
        )
    mismatch = state.mismatch()
    if mismatch is not None:
        raise mismatch
    assert state.overlay is not None
    return state.overlay


def _execute(overlay: Overlay) -> ModuleType:
    """Return the overlay's module. Executes it unless that was done before and one of its classes is still bound."""
    name = f"{_PACKAGE}.{overlay.directory.replace('-', '_').replace('.', '_')}.{overlay.model}"
    module = sys.modules.get(name)
    if module is not None and _bound_by(module):
        return module
    importlib.import_module(overlay.module)
    module = ModuleType(name, f"The overlay {overlay.id}, active in memory.")
    # Tracebacks and inspect read the source lines from this file.
    module.__file__ = str(overlay.path)
    module.__dict__["__hf_rocm_activation__"] = overlay.id
    sys.modules[name] = module
    try:
        exec(compile(overlay.text, str(overlay.path), "exec"), module.__dict__)
    except BaseException:
        for binding in _bound_by(module):
            bind.unbind(binding.cls)
        del sys.modules[name]
        raise
    return module


def _bound_by(module: ModuleType) -> list[bind.Binding]:
    return [binding for binding in bind.bindings() if binding.home is module.__dict__]
