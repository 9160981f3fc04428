"""Decide which models and calls to `generate` decode with recorded steps, and give the reason if they don't.

A reason is a sentence; None means that nothing prevents recording.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._C import _get_tracing_state
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from hf_rocm import features
from hf_rocm.generation import beams, encoder_decoder, hybrid, recorder, speculation, user_cache
from hf_rocm.generation.methods import own
from hf_rocm.generation.watch import KNOWN, attributes_of, modules_of, watches_of
from hf_rocm.layers.grouped_linear import hooks_on_all
from hf_rocm.weights.tensor_parallel import mesh_of

# Some of the methods that hooks.py replaces. A class that overrides one of these is refused.
METHODS = ("_prepare_cache_for_generation", "_valid_auto_compile_criteria", "get_compiled_call", "_sample")


def generator_of(model: Any) -> Any:
    """The transformers model whose `generate` runs when this model generates: this model, or the one inside it.

    PEFT's models do not inherit `GenerationMixin`: their `generate` is the base model's method or calls it.
    """
    from transformers import GenerationMixin

    if isinstance(model, GenerationMixin):
        return model
    base = getattr(model, "get_base_model", None)
    inner = base() if callable(base) else getattr(getattr(model, "generate", None), "__self__", None)
    return inner if isinstance(inner, GenerationMixin) else model


def refuses_class(cls: type) -> str | None:
    """Return why no model of this class can decode with recorded steps, or None."""
    from transformers import GenerationMixin, PreTrainedModel

    if not issubclass(cls, GenerationMixin):
        return "it does not generate"
    for name in METHODS:
        if own(cls, name, PreTrainedModel if name == "get_compiled_call" else GenerationMixin):
            return f"{cls.__name__} overrides {name}"
    if not getattr(cls, "_can_compile_fullgraph", getattr(cls, "_supports_static_cache", False)):
        return f"transformers does not run {cls.__name__} with a static cache"
    return None


def refuses_model(model: Any) -> str | None:
    """Return why this model can't decode with recorded steps now, or None."""
    reason = refuses_class(type(model)) or features.refuses("graph_decode")
    if reason is not None:
        return reason
    config = model.config
    if getattr(type(model), "_is_stateful", False):
        # The layers of a stateful model have recurrent states.
        reason = hybrid.refuses(config.get_text_config(decoder=True))
        if reason is not None:
            return reason
    if config.is_encoder_decoder:
        result = encoder_decoder.windows_of(config)
        reason = result if isinstance(result, str) else features.refuses("encoder_decoder")
        if reason is not None:
            return reason
    if config.model_type == "bloom" or getattr(config, "alibi", False):
        return "its position biases (ALiBi) are computed from the mask"
    layers = config.get_text_config(decoder=True).num_hidden_layers
    if not config.is_encoder_decoder and getattr(config, "decoder_layers", layers) != layers:
        return "some layers of its cache are never written"
    if "llama4" in config.model_type:
        return "transformers does not compile its decode steps"
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return "transformers doesn't compile decode steps with its quantisation"
    if getattr(model, "_compiled_call_impl", None) is not None:
        return "the model is compiled"
    if not model._supports_default_dynamic_cache():
        return f"{type(model).__name__} uses its own cache class"
    return None


def refuses_ranks(model: Any) -> str | None:
    """Return why the ranks that this model is sharded over can't record its steps, or None."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        # This function runs on every call to generate, so skip the rest if there are no ranks.
        return None
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if (getattr(config, "pp_size", None) or 1) > 1:
        return "its layers are split across ranks (pipeline parallelism)"
    if any(hasattr(type(module), "_get_fsdp_state") for module in model.modules()):
        return "FSDP2 gathers its weights from other ranks on every call, and these ranks need not make the same calls"
    meshes = [parameter.device_mesh for parameter in model.parameters() if hasattr(parameter, "device_mesh")]
    if any(mesh.ndim > 1 for mesh in meshes) or (meshes and mesh_of(model) is None):
        return "its weights are DTensors on a device mesh that transformers' tensor parallelism did not create"
    return None


def refuses_device(model: nn.Module) -> str | None:
    """Return why steps can't be recorded on the devices of the model's weights, or None."""
    devices = {
        parameter.device
        for module in modules_of(model)
        for parameter in module._parameters.values()
        if parameter is not None
    }
    if torch.device("meta") in devices:
        return "some of the model's weights are offloaded, and loaded again for every call of their layer"
    if len(devices) > 1:
        return f"the model is on {len(devices)} devices"
    device = next(iter(devices), torch.device("cpu"))
    if device.type not in recorder.factories:
        where = "the CPU" if device.type == "cpu" else device.type
        return f"the model is on {where}, where steps can't be recorded"
    reason = refuses_ranks(model)
    if reason is not None:
        return reason
    mesh = mesh_of(model)
    if mesh is not None:
        backend = torch.distributed.get_backend(mesh.get_group())
        if backend not in recorder.collectives.get(device.type, ()):
            return f"its ranks communicate through {backend}, whose collectives can't be recorded"
    places = set(map(str, getattr(model, "hf_device_map", {}).values()))
    return f"its layers are on several devices: {', '.join(sorted(places))}" if len(places) > 1 else None


def refuses_call(
    model: Any, generation_config: Any, model_kwargs: Mapping[str, Any], mode: Any, assistant: Any = None
) -> str | None:
    """Return why this call to `generate` uses the cache that transformers chooses, or None.

    generation_config: the call's own copy. mode: transformers' `GenerationMode`. assistant: the call's assistant model.
    """
    reason = refuses_modules(model) or refuses_tools() or _refuses_preparation(model)
    reason = reason or features.refuses("graph_decode")
    if reason is not None:
        return reason
    foreign = watches_of(model).foreign
    if foreign is not None:
        return f"a replay would not run replaced code: {foreign}"
    attention = _attention(model)
    if len(attention) > 1:
        return f"its layers have different attention implementations: {', '.join(attention)}"
    if attention[0] not in ("sdpa", "eager"):
        return f"the attention implementation {attention[0]!r} does not accept sequence lengths"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast caches copies of the weights and frees them when it ends"
    name = str(getattr(mode, "value", mode))
    beam_search, drafted = name in beams.MODES, name == speculation.MODE
    if not beam_search and not drafted and name not in ("greedy_search", "sample"):
        return f"{name.replace('_', ' ')} runs uncaptured"
    reason = beams.refuses(model) if beam_search else None
    reason = speculation.refuses(model, generation_config, assistant) if drafted else reason
    if reason is not None:
        return reason
    if generation_config.use_cache is False:
        return "the call uses no cache"
    passed = model_kwargs.get("past_key_values")
    if passed is not None and beam_search:
        return "the call passes a cache, and beam search reorders its rows"
    if passed is not None and drafted:
        return "the call passes a cache, and rejected drafts are removed from it"
    if drafted and model_kwargs.get("inputs_embeds") is not None:
        return "the prompt consists of embeddings, and transformers counts only tokens when it verifies drafts"
    reason = None if passed is None else user_cache.refuses(passed)
    if reason is not None:
        return reason
    requested = generation_config.cache_implementation
    if requested is not None and (passed is not None or requested not in user_cache.NAMED):
        return f"the call requests a cache implementation, {requested!r}"
    config = model.config
    if any(getattr(source, name, None) for source in (generation_config, config) for name in _RETURNED):
        return "the call returns hidden states or attention weights"
    if generation_config.disable_compile:
        return "the call disables compilation, and with it recorded steps"
    if generation_config.compile_config is not None:
        return "the call requests torch.compile"
    if getattr(generation_config, "prefill_chunk_size", None) is not None:
        return "the call requests chunked prefill"
    if model.training:
        return "the model is in training mode"
    return None


def _attention(model: Any) -> list[str]:
    """The attention implementations in the configs of the model's layers; usually, all layers have the same config.

    In some releases, a vision-language model's own config has outdated copies of the configs of its parts.
    """
    text = model.config.get_text_config(decoder=True)
    names, last = set[Any](), None
    for module in modules_of(model):
        config: Any = module.__dict__.get("config")
        if config is not last and type(config) is type(text):
            last = config
            names.add(config._attn_implementation)
    return sorted(names - {None}) or [text._attn_implementation]


_RETURNED = ("output_hidden_states", "output_attentions")


def refuses_modules(model: nn.Module) -> str | None:
    """Return a sentence about user code that a replay would skip (a hook, an assigned function or a class), or None."""
    seen: set[type] = set()
    for module in modules_of(model):
        own = module.__dict__
        for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
            if hooks and any(map(_is_foreign, hooks.values())):
                return f"a replay would not run the hook of {_name(module, model)}"
        if "forward" in own and _is_foreign(own["forward"]):
            return f"a replay would not run the forward that was set on {_name(module, model)}"
        if module is not model:
            for attribute in attributes_of(module):
                if own[attribute].__class__ in _FUNCTIONS and _is_foreign(own[attribute]):
                    return f"a replay would not run the {attribute} that was set on {_name(module, model)}"
        kind = type(module)
        if kind not in seen:
            if kind.__module__.split(".")[0] not in KNOWN:
                return f"{_name(module, model)} is of type {kind.__name__}, whose code a replay would not run"
            if issubclass(kind, torch.jit.ScriptModule):
                return f"{_name(module, model)} is a TorchScript module, whose state can't be compared"
            seen.add(kind)
    return None


def refuses_hooks(model: nn.Module) -> str | None:
    """Like `refuses_modules`, with the hooks for all modules."""
    return "a replay would not run the hook for all modules" if hooks_on_all() else refuses_modules(model)


def refuses_tools() -> str | None:
    """Return a sentence about a tool that observes or transforms all calls, which a replay would skip, or None."""
    if hooks_on_all():
        return "a hook is registered for all modules"
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.maybe_current_level() is not None:
        return "another tool observes or transforms the call"
    if torch._C._len_torch_function_stack() and not all(
        isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()
    ):
        return "another tool observes or transforms the call"
    return None if _get_tracing_state() is None else "the call is traced"


def _name(module: nn.Module, model: nn.Module) -> str:
    return next((name for name, other in model.named_modules() if other is module), "") or "the model"


_FUNCTIONS = frozenset((FunctionType, MethodType, partial))


def _refuses_preparation(model: Any) -> str | None:
    """Return why a `prepare_inputs_for_generation` that was set on the model may need a cache that grows, or None."""
    prepare = model.__dict__.get("prepare_inputs_for_generation")
    if prepare is None:
        return None
    adapter = getattr(getattr(prepare, "__self__", None), "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        return "PEFT's prompt learning prepares steps for a growing cache"
    return "a prepare_inputs_for_generation was set on the model" if _is_foreign(prepare) else None


def _is_foreign(hook: Any) -> bool:
    # Unwrap a partial.
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", None) or type(function).__module__).split(".")[0] not in KNOWN


def windows(model: Any) -> Sequence[int | None] | str:
    """The sliding window of every layer's cache, or why these layers are not supported.

    None: full attention. `hybrid.RECURRENT`: a recurrent state. The result is computed again when the config changes:
    transformers takes most of a millisecond to create a cache.
    """
    if model.config.is_encoder_decoder:
        return encoder_decoder.windows_of(model.config)
    config = model.config.get_text_config(decoder=True)
    last = _last_windows.get(model)
    if last is None or last[0] is not config or last[1] != config.__dict__:
        last = _last_windows[model] = config, copy.deepcopy(config.__dict__), _windows_of(config)
    return last[2]


_Windows = Sequence[int | None] | str
# The config of a model's decoder, a copy of its settings, and the windows of its layers.
_last_windows: WeakKeyDictionary[nn.Module, tuple[Any, dict[str, Any], _Windows]] = WeakKeyDictionary()


def _windows_of(config: Any) -> _Windows:
    from transformers import cache_utils

    sliding = getattr(cache_utils, "StaticSlidingWindowLayer", None)
    if sliding is None:
        # In releases without this class, sliding layers differ only in their masks.
        return [None] * config.num_hidden_layers
    recurrent = getattr(cache_utils, "LinearAttentionLayer", None)
    sizes: list[int | None] = []
    layers: Any = cache_utils.StaticCache(config=config, max_cache_len=_LONG).layers
    for layer in layers:
        if type(layer) is recurrent and hybrid.refuses(config) is None:
            sizes.append(hybrid.RECURRENT)
            continue
        if type(layer) not in (cache_utils.StaticLayer, sliding):
            return f"the cache of one of its layers is of type {type(layer).__name__}"
        window = layer.max_cache_len
        sizes.append(window if type(layer) is sliding and window < _LONG else None)
    if sizes and all(size == hybrid.RECURRENT for size in sizes):
        return "none of its layers has attention"
    return sizes or "transformers creates no static cache for its layers"


_LONG = 2**40
