"""Serve `flash_attention_2` for prepared models where the flash-attn package is not installed.

transformers checks for the package whenever an implementation is selected, and imports the package's functions through
one function, `lazy_import_flash_attention`. For prepared models the check is skipped, and that function returns
hf_rocm's functions for the name `flash_attention_2`. An installed flash-attn package, kernels from the Hub and all
other names are handled as in stock transformers.

With flash attention, continuous batching runs without masks, and therefore with recorded graphs, asynchronous batches
and page tables. A prepared model that uses `sdpa` or `eager` is switched for the batch, as transformers does itself if
flash-attn is installed.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from hf_rocm import features, patches
from hf_rocm.generation.methods import put_before, take_away
from hf_rocm.layers import flash_functions
from hf_rocm.ops import paged, varlen
from hf_rocm.ops.specs.attention import PagedSpec, VarlenSpec
from hf_rocm.overlay import bind
from hf_rocm.patches import Change, Entry

NAME = "flash_attention_2"

# In the __dict__ of a prepared model and of the models inside it: the devices that are served, as in `overlay.bind`.
MARK = "_hf_rocm_flash"

# In the __dict__ of a prepared model: the implementation to return to when hf_rocm's functions are removed.
_DEFAULT = "_hf_rocm_flash_default"

_ARGUMENT = "attn_implementation"

_FEATURE = "flash_interface"
_UTILS = "transformers.modeling_flash_attention_utils"
_MODELING = "transformers.modeling_utils"
_BATCHING = "transformers.generation.continuous_batching.initialization"
_IMPORTER = "lazy_import_flash_attention"
_CHECKS = ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation")

_log = logging.getLogger("hf_rocm")


def switch_on(model: Any, mode: str) -> None:
    """Make `flash_attention_2` available to this model, in the releases that have the interface."""
    if unavailable() is not None:
        return
    for part in _models(model):
        put_before(part, dict.fromkeys(_CHECKS, _checked), MARK)
        part.__dict__[MARK] = mode
    model.__dict__.setdefault(_DEFAULT, model.config._attn_implementation)
    _provide(model)


def switch_off(model: Any) -> None:
    """Undo `switch_on`. A model with these functions returns to the implementation that it had before `prepare`."""
    if MARK in model.__dict__ and unavailable() is None and model.config._attn_implementation in _names():
        model.set_attn_implementation(model.__dict__.get(_DEFAULT, "sdpa"))
    for part in _models(model):
        if MARK in part.__dict__:
            del part.__dict__[MARK]
            take_away(part, MARK)
    model.__dict__.pop(_DEFAULT, None)


def unavailable() -> str | None:
    """Return why this process does not serve `flash_attention_2`, or None if it does."""
    if _installed():
        return "the flash-attn package is installed, and transformers uses it"
    if not hasattr(sys.modules.get(_UTILS) or importlib.import_module(_UTILS), "_flash_with_kvcache_fn"):
        return "this release of transformers has no paged flash attention (5.9 and later have it)"
    if find_spec(_BATCHING) is None:
        return "before transformers 5.9, continuous batching can't use hf_rocm's flash attention"
    return features.refuses(_FEATURE)


def batches_refused(model: Any) -> str | None:
    """Return why continuous batching of this model is not switched to `flash_attention_2`, or None."""
    reason = unavailable()
    if reason is not None:
        return reason
    mode = model.__dict__.get(MARK)
    if mode is None:
        return "the model is not prepared"
    if not getattr(model, "_supports_flash_attn", False):
        return f"{type(model).__name__} does not support flash attention"
    fixed = _not_switchable(model)
    if fixed is not None:
        return f"transformers can't change the attention implementation of {fixed}"
    reason = _paged_faults(model) if len(_names()) > 1 else None
    if reason is not None:
        return reason
    if model.device.type != "cuda":
        return None if mode == bind.ON else f"the model is on {model.device.type}"
    return _without_kernel(model)


def take_request(arguments: dict[str, Any]) -> bool:
    """Remove a request for `flash_attention_2` from the loading arguments, if hf_rocm serves it.

    Returns whether a request was removed. transformers would raise an error while it builds the model; the
    implementation is set after `prepare` instead.
    """
    # `AutoModel*` moves the request into the config.
    config = arguments.get("config")
    requested = arguments.get(_ARGUMENT, getattr(config, "_attn_implementation", None))
    if requested != NAME or unavailable() is not None:
        return False
    # None is transformers' default, and also overrides the config.
    arguments[_ARGUMENT] = None
    return True


def serves(config: Any) -> bool:
    """Return whether the implementation that is selected in this config is computed by hf_rocm."""
    return getattr(config, "_attn_implementation", None) in _names() and unavailable() is None


def switch(model: Any) -> str | None:
    """Switch a model from `sdpa` or `eager` to flash attention for its batches.

    Returns the implementation to restore afterwards, or None if the model was not switched.
    """
    original: str = model.config._attn_implementation
    if original not in ("sdpa", "eager") or batches_refused(model) is not None:
        return None
    model.set_attn_implementation(_names()[-1])
    _log.info("continuous batching runs %s, computed by hf_rocm, instead of %s", NAME, original)
    return original


@functools.cache
def _installed() -> bool:
    return find_spec("flash_attn") is not None


@functools.cache
def _names() -> tuple[str, ...]:
    """The names that are served; the last one is the name for continuous batching in this release."""
    functions = importlib.import_module(_MODELING).ALL_ATTENTION_FUNCTIONS
    with_pages = f"paged|{NAME}"
    return (NAME, with_pages) if with_pages in functions.valid_keys() else (NAME,)


def _models(model: nn.Module) -> list[Any]:
    """The model and the models inside it, which transformers checks one by one."""
    return [part for part in model.modules() if hasattr(type(part), "set_attn_implementation")]


def _checked(self: Any, inherited: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces transformers' checks: they pass for the served names if the model supports flash attention."""
    requested = args[0] if args else kwargs.get("attn_implementation", kwargs.get("requested_attention"))
    supported = getattr(self, "_supports_flash_attn", False)
    if supported and requested in _names() and unavailable() is None:
        _provide(self)
        return requested
    return inherited(*args, **kwargs)


def _provide(user: Any) -> None:
    """Provide hf_rocm's functions wherever transformers imports the functions of `flash_attention_2`."""
    modules = [vars(importlib.import_module(name)) for name in (_UTILS, _MODELING, _BATCHING)]
    changes = [Entry(module, _IMPORTER, _importer, key=MARK) for module in modules if _IMPORTER in module]
    patches.apply(*changes, user=user)


def _importer(change: Change) -> Callable[..., Any]:
    stock = change.owner[_IMPORTER]

    @functools.wraps(stock)
    def lazy_import_flash_attention(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if change.live and implementation in _names() and not _installed():
            return _imported()
        return change.original(implementation, *args, **kwargs)

    return lazy_import_flash_attention


@functools.cache
def _imported() -> Any:
    """The result of this release's `lazy_import_flash_attention`, with hf_rocm's functions."""
    utils = sys.modules[_UTILS]
    kvcache = torch.compiler.disable(flash_functions.flash_attn_with_kvcache)
    functions = (
        flash_functions.flash_attn_func,
        flash_functions.flash_attn_varlen_func,
        kvcache,
        utils._pad_input,
        utils._unpad_input,
    )
    define = utils._lazy_define_process_function
    process = define(flash_functions.flash_attn_varlen_func)
    if not hasattr(utils, "_process_with_kvcache_kwargs_fn"):
        return functions, process
    return functions, (process, define(flash_functions.flash_attn_with_kvcache))


def _not_switchable(model: Any) -> str | None:
    """Return the class name of the model or its decoder if `set_attn_implementation` changes nothing in it, else None.

    The attention of such a class does not look up its function by the name of the implementation.
    """
    decoder = model.config.get_text_config(decoder=True)
    for part in _models(model):
        if part is model or part.config is decoder:
            can_switch = getattr(type(part), "_can_set_attn_implementation", None)
            if can_switch is not None and not can_switch():
                return type(part).__name__
    return None


def _paged_faults(model: Any) -> str | None:
    """Return why paged flash attention of transformers 5.18 and earlier is wrong for this model, or None."""
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None):
        return "paged flash attention in this release of transformers ignores the softcap"
    layers = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling")]
    if getattr(config, "sliding_window", None) and not all(hasattr(layer, "sliding_window") for layer in layers):
        return "paged flash attention in this release of transformers ignores this model's sliding window"
    return None


def _without_kernel(model: Any) -> str | None:
    """Return why no kernel serves this model's batches on its GPU, or None.

    PyTorch's tiers don't count, because they read lengths on the host.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    softcap = bool(getattr(config, "attn_logit_softcapping", None))
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    window = getattr(config, "sliding_window", None)
    common = {
        "dtype": model.dtype,
        "device": model.device,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": dim,
        "value_dim": dim,
        "softcap": softcap,
        "sinks": sinks,
        "grad": False,
    }
    for size in {None, window}:
        packed = VarlenSpec(**common, causal=True, window=size)
        if not varlen.kernel_serves(packed):
            return f"no kernel serves packed sequences of this model ({_refusals(varlen._operation, packed)})"
    for slots in {False, window is not None}:
        pages = PagedSpec(**common, page=256, slots=slots)
        if not paged.kernel_serves(pages):
            return f"no kernel serves this model's pages ({_refusals(paged._operation, pages)})"
    return None


def _refusals(operation: Any, spec: Any) -> str:
    return "; ".join(f"{refusal.name}: {refusal.reason}" for refusal in operation.choose(spec).refusals)
