"""auto_prepare: models that plain transformers loads come back prepared.

Everything that loads weights (`AutoModel*`, a class's own `from_pretrained`, `pipeline`) ends in one class method of
`PreTrainedModel`, which is wrapped. A model that another library loads as a part of its own (a diffusion pipeline's
text encoder) stays stock: the library is recognised by its modules among the callers.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from hf_rocm import options

# Packages that load transformers' encoders as parts of models of their own. A text encoder runs once for an image
# where the rest runs fifty times, and these libraries move, offload and compile what they load.
LEFT_STOCK = ("diffusers", "comfy", "invokeai", "open_clip", "sentence_transformers")

_log = logging.getLogger("hf_rocm")
_lock = threading.RLock()
_loading = threading.local()  # depth: how many from_pretrained of this thread are running
_said: set[str] = set()
_patch: _Patch | None = None


class _Patch:
    """The wrapped class method, and what was found in its place."""

    def __init__(self, cls: Any, left_stock: frozenset[str], force: bool | None) -> None:
        self.cls = cls
        self.left_stock = left_stock
        self.force = force
        self.live = True
        self.found: Any = cls.__dict__["from_pretrained"]
        self.wrapped = classmethod(self._wrap(self.found.__func__))
        cls.from_pretrained = self.wrapped

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = self.live and not getattr(_loading, "depth", 0)
            with suspended():
                loaded = stock(cls, *args, **kwargs)
                if not outermost or _caller(self.left_stock) is not None:
                    return loaded
                from hf_rocm.weights.prepare import prepare

                if isinstance(loaded, tuple):  # output_loading_info=True
                    return (prepare(loaded[0], force=self.force), *loaded[1:])
                return prepare(loaded, force=self.force)

        return from_pretrained

    def remove(self) -> None:
        self.live = False
        if self.cls.__dict__["from_pretrained"] is self.wrapped:
            self.cls.from_pretrained = self.found
        else:
            _log.warning("PreTrainedModel.from_pretrained was wrapped by someone else after hf_rocm; theirs stays")


def auto_prepare(enabled: bool = True, *, also: Iterable[str] = (), force: bool | None = None) -> bool:
    """Have every model that transformers loads from here on prepared, as `hf_rocm.from_pretrained` would; or stop it.

    enabled: False puts transformers' own method back; models that were prepared stay so (`hf_rocm.restore`).
    also: packages of `LEFT_STOCK` whose models are to be prepared too, such as `diffusers`. force: as in `prepare`.

    Returns whether it is on now. Without ROCm, and unless forced, nothing is done, and the `hf_rocm` logger says so
    once. `HF_ROCM_AUTO=1` does the same from within an installed overlay, as soon as its model is imported.
    """
    if enabled and not _wanted(force):
        return False
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if enabled:
        modeling = import_module("transformers.modeling_utils")
    return _switch(modeling, enabled, frozenset(LEFT_STOCK) - frozenset(also), force)


def switch_on_from_block() -> None:
    """`HF_ROCM_AUTO=1`, asked by an installed block that serves here. Imports nothing and touches no device."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if _patch is None and modeling is not None:
        _switch(modeling, True, frozenset(LEFT_STOCK), None)


@contextmanager
def suspended() -> Iterator[None]:
    """What this thread loads within the block is not prepared by us: somebody outside sees to it, or wants it stock."""
    _loading.depth = getattr(_loading, "depth", 0) + 1
    try:
        yield
    finally:
        _loading.depth -= 1


def _switch(modeling: Any, enabled: bool, left_stock: frozenset[str], force: bool | None) -> bool:
    global _patch
    with _lock:
        if enabled and _patch is not None:
            _patch.left_stock, _patch.force = left_stock, force
        elif enabled:
            _patch = _Patch(modeling.PreTrainedModel, left_stock, force)
        elif _patch is not None:
            _patch.remove()
            _patch = None
        return _patch is not None


def _wanted(force: bool | None) -> bool:
    if force is False:
        return False
    if force or options.force_requested():
        return True
    from hf_rocm.device import is_rocm

    if is_rocm():
        return True
    if "no ROCm" not in _said:
        _said.add("no ROCm")
        _log.warning("models stay stock: this PyTorch is not a ROCm build (HF_ROCM_FORCE=1 prepares them anyway)")
    return False


def _caller(packages: frozenset[str]) -> str | None:
    """The package of these, if any, that the call comes from."""
    frame = sys._getframe(2)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in packages:
            return package
        frame = frame.f_back  # type: ignore[assignment]
    return None
