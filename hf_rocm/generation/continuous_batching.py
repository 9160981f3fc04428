"""Continuous batching of prepared models: hf_rocm's flash attention if possible, and no graphs that may be wrong.

If `flash_provider` serves a model, the model's batches run with `flash_attention_2`. Afterwards its previous attention
implementation is restored.

transformers records its own graphs for continuous batching and never compares a replay with an uncaptured step. So
these graphs follow the rules of recorded steps (`suspects`): they are disabled on machines with a known fault, unless
the user requests or requires them.
"""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from hf_rocm import patches
from hf_rocm.generation import flash_provider, sliding_pages, suspects
from hf_rocm.generation.methods import put_before

# In a prepared model's __dict__: a bool, whether graphs are required.
MARK = "_hf_rocm_continuous_batching"

# The attribute of a manager that contains the implementation to restore.
_ORIGINAL = "_original_attn_impl"

_METHOD = "init_continuous_batching"

# An argument of `init_continuous_batching`.
_HINTS = "workload_hints"

# The largest number of pages of a request with a page table, unless the user sets a limit. The tables of all requests
# are copied to the device in every step.
_MOST_PAGES = 128

# The manager's method that allocates the cache, in the thread that runs the steps.
_CREATE = "_create_batch_processor"

# transformers records graphs if one of these is set in the config or passed as an argument.
_PADDINGS = (
    "q_padding_interval_size",
    "kv_padding_interval_size",
    "num_q_padding_intervals",
    "num_kv_padding_intervals",
)

_log = logging.getLogger("hf_rocm")


def switch_on(model: nn.Module, *, required: bool) -> None:
    """Apply these rules to continuous batching of this model, in the releases that support it.

    required: whether the user requires graphs; if so, they are recorded as in stock transformers.
    """
    if hasattr(type(model), _METHOD):
        put_before(model, {_METHOD: _init_continuous_batching}, MARK)
        model.__dict__[MARK] = required


def describe(model: nn.Module) -> str | None:
    """One sentence for `explain` on the graphs of the next batch.

    None if the model can't run in batches, or if no known fault affects the graphs.
    """
    required = model.__dict__.get(MARK)
    fault = None if required is None or not _can_batch(model) else suspects.fault_of(model.device)
    if fault is None:
        return None
    reason = suspects.reason(fault)
    if required:
        return f"continuous batching may record transformers' own graphs, because graphs are required, though {reason}"
    return f"continuous batching records no graphs, unless its config sets use_cuda_graph: {reason}"


def attention_of(model: nn.Module) -> str | None:
    """One sentence for `explain` on the attention of the next batch, or None if the model can't run in batches."""
    if MARK not in model.__dict__ or not _can_batch(model):
        return None
    config: Any = model.config
    selected = getattr(config, "_attn_implementation", None)
    if selected not in ("sdpa", "eager", flash_provider.NAME):
        return f"continuous batching runs {selected!r}, the selected implementation"
    reason = flash_provider.batches_refused(model)
    if reason is None:
        gathered = sliding_pages.refused() if sliding_pages.has_sliding_layers(config.get_text_config()) else None
        steps = "" if gathered is None else f"; its decode steps gather their keys, because {gathered}"
        return f"continuous batching runs {flash_provider.NAME!r}, computed by hf_rocm with a paged cache{steps}"
    return f"continuous batching runs as in stock transformers: {reason}"


def _can_batch(model: Any) -> bool:
    """Return whether transformers' paged cache supports all layers: full or sliding attention in a decoder."""
    if model.config.is_encoder_decoder:
        return False
    known = sliding_pages.SLIDING, sliding_pages.FULL
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    return all(kind in known for kind in kinds or ())


def _init_continuous_batching(self: Any, inherited: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(inherited).bind(*args, **kwargs)
    _, config = _config(self, call)
    original = flash_provider.switch(self) if getattr(config, "auto_switch_to_flash", True) else None
    if flash_provider.MARK in self.__dict__ and flash_provider.serves(self.config):
        sliding_pages.provide(self, flash_provider.serves, key=flash_provider.MARK)
        _expect_long_requests(self, call, config)
        args, kwargs = call.args, call.kwargs
    if original is None:
        return _in_order(_without_suspect_graphs(self, inherited, *args, **kwargs))
    try:
        manager = _without_suspect_graphs(self, inherited, *args, **kwargs)
    except BaseException:
        self.set_attn_implementation(original)
        raise
    # The manager restores this implementation when it stops.
    patches.exchange(manager.__dict__, _ORIGINAL, None, original)
    return _in_order(manager)


def _expect_long_requests(model: Any, call: inspect.BoundArguments, config: Any) -> None:
    """Increase transformers' limit on the length of requests with page tables if the call passes no workload hints."""
    default_pages = getattr(config, "fallback_max_blocks_per_request", None)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if default_pages is None or longest is None or call.arguments.get(_HINTS) is not None:
        return
    # Up to transformers 5.17, `page_size` is called `block_size`.
    page = config.page_size if hasattr(config, "page_size") else config.block_size
    if longest > default_pages * page:
        from transformers.generation.continuous_batching.utils import WorkloadHints

        # transformers adds a page.
        keys = min(longest, (_MOST_PAGES - 1) * page)
        call.arguments[_HINTS] = WorkloadHints(max_prompt_length=keys, max_generated_length=0, num_requests=0)


def _in_order(manager: Any) -> Any:
    """Make the manager wait for the device before its first step, in releases that run steps on separate streams."""
    if not hasattr(type(manager), _CREATE):
        return manager
    reference = weakref.ref(manager)

    def create_batch_processor() -> Any:
        owner = reference()
        processor = getattr(type(owner), _CREATE)(owner)
        _wait(owner.model.device)  # type: ignore[union-attr]
        return processor

    patches.exchange(manager.__dict__, _CREATE, patches.ABSENT, create_batch_processor)
    return manager


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _without_suspect_graphs(self: Any, inherited: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    fault = suspects.fault_of(self.device)
    if fault is None:
        return inherited(*args, **kwargs)
    call = inspect.signature(inherited).bind(*args, **kwargs)
    name, config = _config(self, call)
    if config is None:
        return inherited(*args, **kwargs)
    reason, requested = suspects.reason(fault), _requested(config, {**kwargs, **call.arguments})
    if requested is None and not self.__dict__[MARK]:
        _warn("continuous batching records no graphs: %s; use_cuda_graph=True in its config enables them", reason)
        config = copy.copy(config)
        config.use_cuda_graph = False
        call.arguments[name] = config
        return inherited(*call.args, **call.kwargs)
    if requested is not False:
        _warn("continuous batching may record graphs, as requested, though %s", reason)
    return inherited(*args, **kwargs)


def _config(model: Any, call: inspect.BoundArguments) -> tuple[str, Any]:
    """Return the name of the argument with `use_cuda_graph` in this release, and its value (or default) in the call."""
    generation_config = call.arguments.get("generation_config")
    if generation_config is None:
        generation_config = model.generation_config
    if "continuous_batching_config" not in call.signature.parameters:
        return "generation_config", generation_config
    from transformers.generation import ContinuousBatchingConfig

    config = call.arguments.get("continuous_batching_config")
    if config is None:
        deprecated = getattr(generation_config, "continuous_batching_config", None)
        config = deprecated if isinstance(deprecated, ContinuousBatchingConfig) else ContinuousBatchingConfig()
    return "continuous_batching_config", config


def _requested(config: Any, arguments: Mapping[str, Any]) -> bool | None:
    """Whether the user requested graphs, directly or by sizes that only graphs need; None if neither is set."""
    value = getattr(config, "use_cuda_graph", None)
    if value is not None:
        # A tuple contains the values for (prompts, steps).
        return any(value) if isinstance(value, tuple) else bool(value)
    return True if any(getattr(config, name, 0) or arguments.get(name) for name in _PADDINGS) else None


@cache
def _warn(message: str, reason: str) -> None:
    """Log a message once per process."""
    _log.warning(message, reason)
