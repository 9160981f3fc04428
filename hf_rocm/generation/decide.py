"""Which models and which calls of `generate` decode over recorded steps, and why the others don't.

A reason is a sentence; None means that nothing is in the way. A call is served only if its user asked for nothing that
a cache of ours would change: no cache, no implementation of one, nothing returned but tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_rocm.generation import features, recorder
from hf_rocm.generation.methods import own
from hf_rocm.weights.colwise import mesh_of

# The methods that are put on the model's class; see hooks.py.
METHODS = ("_prepare_cache_for_generation", "_valid_auto_compile_criteria", "get_compiled_call", "_sample")

# What the configs of Gemma ask for in older releases: a static cache with sliding layers, which ours is.
_HYBRID = ("hybrid", "static")


def refuses_class(cls: type) -> str | None:
    """Why no model of this class can be served."""
    from transformers import GenerationMixin, PreTrainedModel

    if not issubclass(cls, GenerationMixin):
        return "it does not generate"
    for name in METHODS:
        if own(cls, name, PreTrainedModel if name == "get_compiled_call" else GenerationMixin):
            return f"{cls.__name__} has a {name} of its own"
    if not getattr(cls, "_can_compile_fullgraph", getattr(cls, "_supports_static_cache", False)):
        return f"transformers does not run {cls.__name__} over a static cache"
    return f"{cls.__name__} keeps a state beside its cache" if getattr(cls, "_is_stateful", False) else None


def refuses_model(model: Any) -> str | None:
    """Why this model can't be served as it is now."""
    reason = refuses_class(type(model)) or features.refuses("graph_decode")
    if reason is not None:
        return reason
    config = model.config
    if config.is_encoder_decoder:
        return "it has an encoder beside its decoder"
    if config.model_type == "bloom" or getattr(config, "alibi", False):
        return "its positions are made from the mask"
    layers = config.get_text_config(decoder=True).num_hidden_layers
    if getattr(config, "decoder_layers", layers) != layers:
        return "its cache has layers that nothing is written to"
    if "llama4" in config.model_type:
        return "transformers doesn't compile its steps either"
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return "transformers doesn't compile steps of its quantisation"
    if getattr(model, "_compiled_call_impl", None) is not None:
        return "the model is compiled"
    if not model._supports_default_dynamic_cache():
        return f"{type(model).__name__} brings a cache of its own"
    return None


def refuses_ranks(model: Any) -> str | None:
    """Why ranks that this model's weights are spread over can't record its steps."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None  # asked in every call of generate: without ranks there is nothing to look for
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if (getattr(config, "pp_size", None) or 1) > 1:
        return "its layers are divided among ranks"
    if any(hasattr(type(module), "_get_fsdp_state") for module in model.modules()):
        return "its weights are gathered from other ranks for each call (FSDP2), and those need not make the same calls"
    meshes = [each.device_mesh for each in model.parameters() if hasattr(each, "device_mesh")]
    if any(mesh.ndim > 1 for mesh in meshes) or (meshes and mesh_of(model) is None):
        return "its weights are DTensors over ranks that transformers' tensor parallelism doesn't know"
    return None


def refuses_device(model: nn.Module) -> str | None:
    """Why steps can't be recorded where the model's weights are."""
    devices = {parameter.device for parameter in model.parameters()}
    if torch.device("meta") in devices:
        return "some of its weights are offloaded, and brought for each call of their layer"
    if len(devices) > 1:
        return f"its weights are on {len(devices)} devices"
    device = next(iter(devices), torch.device("cpu"))
    if device.type not in recorder.factories:
        return f"its weights are on {device.type}, where nothing can be recorded"
    reason = refuses_ranks(model)
    if reason is not None:
        return reason
    mesh = mesh_of(model)
    if mesh is not None:
        backend = torch.distributed.get_backend(mesh.get_group())
        if backend not in recorder.collectives.get(device.type, ()):
            return f"its ranks exchange through {backend}, whose collectives can't be recorded"
    places = set(map(str, getattr(model, "hf_device_map", {}).values()))
    return f"it is spread over {', '.join(sorted(places))}" if len(places) > 1 else None


def refuses_call(model: Any, generation_config: Any, model_kwargs: Mapping[str, Any], mode: Any) -> str | None:
    """Why this call of `generate` keeps the cache that transformers gives it.

    generation_config: the call's own copy. mode: transformers' `GenerationMode`.
    """
    asked = generation_config
    reason = refuses_modules(model)
    if reason is not None:
        return reason
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f"the attention implementation {attention!r} takes no lengths"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast keeps copies of the weights that end with it"
    if getattr(mode, "value", mode) not in ("greedy_search", "sample"):
        return f"{str(getattr(mode, 'value', mode)).replace('_', ' ')} runs uncaptured"
    if model_kwargs.get("past_key_values") is not None:
        return "the call brings a cache"
    if asked.use_cache is False:
        return "the call uses no cache"
    own = getattr(model.config.get_text_config(), "cache_implementation", None)
    if asked.cache_implementation not in (None, own if own in _HYBRID else None, "hybrid"):
        return f"the call asks for a cache, {asked.cache_implementation!r}"
    config = model.config
    if any(getattr(each, name, None) for each in (asked, config) for name in _RETURNED):
        return "the call returns what happens within the layers"
    if asked.return_dict_in_generate:
        return "the call returns its cache"
    if asked.disable_compile:
        return "the call disables compilation, and with it recorded steps"
    if asked.compile_config is not None:
        return "the call asks for torch.compile"
    if getattr(asked, "prefill_chunk_size", None) is not None:
        return "the call asks for a prompt in chunks"
    if getattr(asked, "is_assistant", False):
        return "the model assists another one"
    if model.training:
        return "the model is in training mode"
    return None


_RETURNED = ("output_hidden_states", "output_attentions")

# Whose modules compute the same at every step, and whose hooks only see to memory or collect what is returned.
_KNOWN = {"torch", "transformers", "hf_rocm", "peft", "accelerate", "bitsandbytes", "torchao", "compressed_tensors"}


def refuses_modules(model: nn.Module) -> str | None:
    """Which code of the user's own a replay would leave out: hooks, forwards, classes; they may count or steer."""
    seen: set[type] = set()
    for name, module in model.named_modules():
        where = name or "the model"
        own = module.__dict__
        hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
        if any(_stranger(hook) for hook in hooks):
            return f"a replay would not run the hook of {where}"
        if "forward" in own and _stranger(own["forward"]):
            return f"a replay would not run the forward that was put on {where}"
        kind = type(module)
        if kind not in seen and kind.__module__.split(".")[0] not in _KNOWN:
            return f"{where} is a {kind.__name__}, whose code a replay would not run"
        seen.add(kind)
    return None


def _stranger(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__module__", None) or type(function).__module__).split(".")[0] not in _KNOWN


def windows(model: Any) -> Sequence[int | None] | str:
    """The sliding window of each layer's cache, None where it keeps all; or why the model's layers can't be served."""
    from transformers import cache_utils

    config = model.config.get_text_config(decoder=True)
    sliding = getattr(cache_utils, "StaticSlidingWindowLayer", None)
    if sliding is None:
        return [None] * config.num_hidden_layers  # masks alone keep what a sliding layer sees apart
    found: list[int | None] = []
    layers: Any = cache_utils.StaticCache(config=config, max_cache_len=_LONG).layers
    for layer in layers:
        if type(layer) not in (cache_utils.StaticLayer, sliding):
            return f"a layer of it keeps its state in a {type(layer).__name__}"
        window = layer.max_cache_len
        found.append(window if type(layer) is sliding and window < _LONG else None)
    return found or "transformers makes no static cache of its layers"


_LONG = 2**40
