"""Determine which models and calls are recorded, and why others run uncaptured. A reason is a sentence or None."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm.forwards.snapshot import refuses_weights
from hf_rocm.generation import suspects
from hf_rocm.generation.decide import refuses_device, refuses_modules, refuses_tools
from hf_rocm.generation.watch import watches_of
from hf_rocm.ops.captured import in_captured_block
from hf_rocm.options import Switch
from hf_rocm.weights.tensor_parallel import mesh_of

# Arguments of a forward that runs once per token.
_STEP_ARGUMENTS = ("past_key_values", "past_key_value", "cache_params", "use_cache")


def encoders(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of every outermost model that doesn't generate: `model` itself, or models in it.

    The forwards of these models are recorded. For a model that generates, decode steps are recorded instead. Inside
    such a model, only models without a cache are yielded: towers for images and audio, but not the decoder. A model
    with the config of an encoder-decoder model, such as `BartModel` or its encoder, counts as one that generates.
    """
    from transformers import PreTrainedModel

    waiting: list[tuple[str, nn.Module, bool]] = [("", model, False)]
    seen: set[int] = set()
    while waiting:
        name, module, inside = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, PreTrainedModel):
            inside = inside or _generates(module)
            if not _generates(module) and not (inside and _steps(module)):
                yield name, module
                continue
        children = [(f"{name}.{key}" if name else key, child, inside) for key, child in module.named_children()]
        waiting += reversed(children)


def _generates(model: Any) -> bool:
    from transformers import GenerationMixin

    return isinstance(model, GenerationMixin) or bool(getattr(model.config, "is_encoder_decoder", False))


def _steps(model: Any) -> bool:
    forward = inspect.unwrap(type(model).forward)
    return any(name in inspect.signature(forward).parameters for name in _STEP_ARGUMENTS) or any(
        _steps(child)
        for child in model.children()
        if hasattr(child, "config") and hasattr(child, "get_input_embeddings")
    )


def refuses_model(model: Any, wanted: Switch) -> str | None:
    """Return why forwards of this model are never recorded, or None."""
    if wanted is Switch.OFF:
        return "graphs are switched off"
    if getattr(model, "_compiled_call_impl", None) is not None:
        return "the model is compiled"
    if "forward" in model.__dict__:
        return "the model's forward attribute was replaced, for example by a hook of accelerate"
    return refuses_weights(model) or suspects.refuses(model.device, required=wanted is Switch.REQUIRED)


def refuses_state(model: Any) -> str | None:
    """Return why forwards are not recorded while the model is in this state, or None. Takes about a millisecond."""
    reason = refuses_weights(model) or refuses_device(model) or refuses_modules(model)
    if reason is not None:
        return reason
    if mesh_of(model) is not None:
        return "the model's layers are split across several ranks"
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        return f"{training or 'the model'} is in training mode"
    foreign = watches_of(model).foreign
    return None if foreign is None else f"a replay would not run replaced code: {foreign}"


def refuses_call(model: Any, device: torch.device) -> str | None:
    """Return why a call in the current state of PyTorch runs uncaptured, or None. Takes a few microseconds."""
    if model.training:
        return "the model is in training mode"
    if torch.is_grad_enabled():
        return "gradients are enabled (torch.no_grad() and torch.inference_mode() disable them)"
    if torch.is_autocast_enabled(device.type):
        return "autocast caches copies of the weights and frees them when it ends"
    if in_captured_block() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return "the call is part of another recording"
    return refuses_tools()


def refuses_tensor(tensor: Tensor, device: torch.device) -> str | None:
    """Return why a call with this input runs uncaptured, or None."""
    if tensor.__class__ not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_complex():
        actual = f"type {type(tensor).__name__}, dtype {tensor.dtype} and layout {tensor.layout}"
        return f"inputs must be plain strided tensors of a real dtype, got {actual}"
    if tensor.device != device:
        return "an input is on a different device from the model"
    return None
