"""auto_prepare: prepare every model that plain transformers loads.

All loading (`AutoModel*`, a class's own `from_pretrained`, `pipeline`) ends in one class method of `PreTrainedModel`,
which is wrapped. A model that another library loads as a part of its own model, such as the text encoder of a diffusion
pipeline, stays stock. Such a library is recognised by its modules on the call stack.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from hf_rocm import options, patches
from hf_rocm.arguments import require_bool, require_switches
from hf_rocm.errors import OptionError
from hf_rocm.patches import Change

# Packages that load transformers' encoders as parts of their own models. A text encoder runs once per image, the other
# parts about fifty times, and these libraries move, offload and compile the models that they load.
LEFT_STOCK = ("diffusers", "comfy", "invokeai", "open_clip", "sentence_transformers")

_log = logging.getLogger("hf_rocm")
_lock = threading.RLock()
# `depth`: the number of nested `suspended` blocks in this thread.
_loading = threading.local()
_warned: set[str] = set()
_switch: _Switch | None = None


class _Switch:
    """The state of auto_prepare while it is on. An instance is also the `user` of the change (see `patches`)."""

    def __init__(self, left_stock: frozenset[str], force: bool | None) -> None:
        self.left_stock = left_stock
        self.force = force

    def from_pretrained(self, change: Change) -> Any:
        """Return a class method that calls transformers' own method and prepares its result."""

        @functools.wraps(change.owner.from_pretrained.__func__)
        def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = change.live and not getattr(_loading, "depth", 0)
            if not outermost or _caller(self.left_stock) is not None:
                with suspended():
                    return change.call_of(cls)(*args, **kwargs)
            from hf_rocm.generation import flash_provider
            from hf_rocm.loading import heap_copies, stored_checkpoints
            from hf_rocm.loading.prepare import prepare

            flash = flash_provider.take_request(kwargs)
            with suspended():
                with heap_copies.where_needed():
                    loaded = stored_checkpoints.load(change.call_of(cls), *args, **kwargs)

                # With output_loading_info=True, `from_pretrained` returns a tuple.
                model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
                model = prepare(model, force=self.force)
                if flash:
                    model.set_attn_implementation(flash_provider.NAME)
                return (model, *info) if info else model

        return classmethod(from_pretrained)


def auto_prepare(enabled: bool = True, *, also: Iterable[str] = (), force: bool | None = None) -> bool:
    """Prepare every model that transformers loads from now on, as `hf_rocm.from_pretrained` does, or stop doing so.

    enabled: False restores transformers' own method; models that were prepared stay prepared (see `hf_rocm.restore`).
    also: packages of `LEFT_STOCK`, such as `diffusers`, whose models are prepared too. force: as in `prepare`.

    Returns True if this call switches it on or sets its settings, even to the same values; else False. Without ROCm, a
    call switches nothing on unless forced, and the `hf_rocm` logger warns once. `HF_ROCM_AUTO=1` does the same from an
    installed overlay, as soon as the overlay's model file is imported.
    """
    require_bool(enabled, "auto_prepare")
    require_switches(force=force)
    if isinstance(also, str) or not isinstance(also, Iterable):
        raise OptionError(f"also={also!r} is not valid", facts={"allowed": "a list of packages, such as ['diffusers']"})
    if enabled and not _wanted(force):
        return False
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if enabled:
        modeling = import_module("transformers.modeling_utils")
    return _set(modeling, enabled, frozenset(LEFT_STOCK) - frozenset(also), force)


def switch_on_from_block() -> None:
    """Switch auto_prepare on for `HF_ROCM_AUTO=1`, from an installed block. Imports nothing and opens no device."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if _switch is None and modeling is not None:
        _set(modeling, True, frozenset(LEFT_STOCK), None)


@contextmanager
def suspended() -> Iterator[None]:
    """Within the block, do not prepare models that this thread loads. The caller prepares them or leaves them stock."""
    _loading.depth = getattr(_loading, "depth", 0) + 1
    try:
        yield
    finally:
        _loading.depth -= 1


def _set(modeling: Any, enabled: bool, left_stock: frozenset[str], force: bool | None) -> bool:
    global _switch
    with _lock:
        if enabled and _switch is not None:
            _switch.left_stock, _switch.force = left_stock, force
        elif enabled:
            _switch = _Switch(left_stock, force)
            patches.apply(Change(modeling.PreTrainedModel, "from_pretrained", _switch.from_pretrained), user=_switch)
        elif _switch is not None:
            patches.release(_switch)
            _switch = None
        return _switch is not None


def _wanted(force: bool | None) -> bool:
    if force is False:
        return False
    if force or options.force_requested():
        return True
    from hf_rocm.device import is_rocm

    if is_rocm():
        return True
    if "no ROCm" not in _warned:
        _warned.add("no ROCm")
        _log.warning("models stay stock: this PyTorch is not a ROCm build (HF_ROCM_FORCE=1 prepares them anyway)")
    return False


def _caller(packages: frozenset[str]) -> str | None:
    """Return the first of these packages on the call stack, or None."""
    frame = sys._getframe(2)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in packages:
            return package
        frame = frame.f_back  # type: ignore[assignment]
    return None
