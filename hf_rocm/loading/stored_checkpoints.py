"""Load quantised checkpoints with their stored bytes, in the layers of `hf_rocm.weights.stored_linear`.

During one load, in this thread only, hf_rocm's quantiser replaces transformers' quantiser. Checkpoints that it does not
support are loaded by transformers, and the reason is logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from hf_rocm import patches
from hf_rocm.patches import Change, Entry
from hf_rocm.weights import kinds
from hf_rocm.weights.stored import Unsupported, parsers

ResultT = TypeVar("ResultT")

_log = logging.getLogger("hf_rocm")
# `quantizer`: the quantiser of this thread's load, or None. `active`: whether a load is in progress.
_loading = threading.local()

_SETTINGS = b"quantization_config"
# A file in the folder of an adapter, whose base model is elsewhere.
_ADAPTER = "adapter_config.json"

_FILES = "_get_resolved_checkpoint_files"

# If one of these arguments of from_pretrained is given, transformers loads the checkpoint.
_STOCK = ("quantization_config", "tp_plan", "tp_size", "distributed_config", "device_mesh", "state_dict", "gguf_file")


def load(call: Callable[..., ResultT], *given: Any, **arguments: Any) -> ResultT:
    """Return call(*given, **arguments), which loads a model. A supported quantised checkpoint keeps its stored bytes.

    Raises `LoadError` if tensors of such a checkpoint are missing or do not fit.
    """
    if any(arguments.get(name) is not None for name in _STOCK) or _is_plain(given, arguments):
        return call(*given, **arguments)
    try:
        with _replaced_quantizers():
            return call(*given, **arguments)
    except Unsupported as reason:
        _log.warning("the quantised checkpoint is loaded by transformers: %s", reason)
    return call(*given, **arguments)


def _is_plain(given: Sequence[Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint is a folder without a quantization config, so that loading needs no change."""
    if len(given) != 1 or any(arguments.get(name) is not None for name in ("config", "subfolder")):
        return False
    try:
        folder = Path(given[0])
        return not (folder / _ADAPTER).exists() and _SETTINGS not in (folder / "config.json").read_bytes()
    except (OSError, TypeError, ValueError):
        return False


@contextmanager
def _replaced_quantizers() -> Iterator[None]:
    auto: Any = import_module("transformers.quantizers.auto")
    modeling: Any = import_module("transformers.modeling_utils")
    kinds.import_all()
    if not hasattr(modeling, _FILES):
        raise Unsupported(f"this release of transformers has no {_FILES}")
    configs, quantizers = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    methods = [method for method in parsers() if method in configs and method in quantizers]
    changes: list[Change] = [Entry(configs, method, _Config) for method in methods]
    changes += [Entry(quantizers, method, _quantizer) for method in methods]
    changes.append(Change(modeling, _FILES, _files))
    # Only releases before 5.0 have this function.
    if hasattr(modeling, "_infer_parameter_dtype"):
        changes.append(Change(modeling, "_infer_parameter_dtype", _own_dtype))
    with patches.applied(*changes):
        before = dict(vars(_loading))
        _loading.active, _loading.quantizer = True, None
        try:
            yield
        finally:
            _loading.active, _loading.quantizer = before.get("active"), before.get("quantizer")


class _Config:
    """Replaces a quantisation config class."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def from_dict(self, given: Mapping[str, Any], **arguments: Any) -> Any:
        if self._change.live and getattr(_loading, "active", None):
            from hf_rocm.loading.stored_quantizer import StoredConfig

            method = str(self._change.name)
            return StoredConfig(dict(given), parsers()[method](given), method)
        return self._change.original.from_dict(given, **arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._change.original, name)

    def __call__(self, *given: Any, **arguments: Any) -> Any:
        return self._change.original(*given, **arguments)


def _quantizer(change: Change) -> Callable[..., Any]:
    def quantizer(config: Any, **arguments: Any) -> Any:
        from hf_rocm.loading.stored_quantizer import StoredConfig, StoredQuantizer

        if not change.live or not isinstance(config, StoredConfig):
            return change.original(config, **arguments)
        _loading.quantizer = StoredQuantizer(config, **arguments)
        return _loading.quantizer

    return quantizer


def _files(change: Change) -> Callable[..., Any]:
    """Return a function that finds a checkpoint's files. The quantiser reads their headers before the model exists."""

    def resolved(*given: Any, **arguments: Any) -> Any:
        result = change.original(*given, **arguments)
        quantizer = getattr(_loading, "quantizer", None)
        if quantizer is not None:
            quantizer.read_headers(result[0])
        return result

    return resolved


def _own_dtype(change: Change) -> Callable[..., Any]:
    """Return a function that chooses the dtype of a loaded tensor. Tensors of quantised layers keep their dtype."""

    def infer(model: Any, param_name: str, empty_param: Any, *given: Any, **arguments: Any) -> Any:
        contiguous, dtype = change.original(model, param_name, empty_param, *given, **arguments)
        if getattr(_loading, "quantizer", None) is not None:
            from hf_rocm.weights.stored_linear import StoredLayer

            path, _, name = param_name.rpartition(".")
            layer = model.get_submodule(path)
            if isinstance(layer, StoredLayer) and name in layer.infos:
                return contiguous, None
        return contiguous, dtype

    return infer
