"""Linear attention with the gated delta rule: decide whether the operations can serve a call, and run them.

A step of one token updates the two states of its layer's cache in place, as stock does. A prompt, or a part of one,
starts from the states of the cache, and the cache's own methods write the resulting states.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, compiler

from hf_rocm import ops
from hf_rocm.layers.fallback_reasons import note
from hf_rocm.layers.mlp import looks_up
from hf_rocm.layers.norm import is_plain
from hf_rocm.ops import delta
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.linear import left_to_pytorch
from hf_rocm.overlay.replacements import constant_in_traces

# Packages with their own kernels, which transformers prefers to its PyTorch functions if they are installed.
_LIBRARIES = ("fla", "causal_conv1d")


class DeltaStates(NamedTuple):
    """The states of one layer: conv [B, C, K], the last K inputs of every channel; recurrent [B, H, D_k, D_v]."""

    conv: Tensor
    recurrent: Tensor


class DeltaTokens(NamedTuple):
    """The tokens of one call: x [B, hidden] of a step, or [B, S, hidden] of a prompt, whose padding is zero.

    states: the states before the tokens, or None at the start of a sequence. cache: the call's cache, or None.
    """

    x: Tensor
    states: DeltaStates | None
    cache: Any


def delta_tokens(
    module: Any, x: Tensor, cache: Any, mask: Tensor | None, arguments: Mapping[str, Any]
) -> DeltaTokens | None:
    """Return the tokens of this call, or None if the stock forward must run; `explain` shows the reason.

    module: the linear-attention layer, with the attributes of Qwen3-Next's layer. x: [B, S, hidden]. mask: [B, S], 0
    for padding, or None. arguments: the call's other keyword arguments.
    """
    states = None if cache is None else _states(module, cache)
    reason = states if isinstance(states, str) else _refuses(module, x, mask, arguments, states)
    note(module, reason)
    if reason is not None or isinstance(states, str):
        return None
    if mask is not None:
        x = (x * mask.unsqueeze(-1)).to(x.dtype)
    return DeltaTokens(x if states is None or x.shape[1] != 1 else x[:, 0], states, cache)


def gated_delta(module: Any, inputs: Sequence[Tensor], tokens: DeltaTokens) -> Tensor:
    """Apply the gated delta rule with the weights of the layer. Returns [B, S, H · D_v].

    inputs: queries, keys, values, gates, and the logits of beta and decay, as `ops.gated_delta_step` takes them for a
    step, and `ops.gated_delta_prefill` for a prompt.
    """
    norm, states, cache = module.norm, tokens.states, tokens.cache
    terms: dict[str, Any] = {
        "conv_weight": module.conv1d.weight.squeeze(1),
        "log_rate": module.A_log,
        "bias": module.dt_bias,
        "norm_weight": norm.weight,
        "eps": norm.variance_epsilon,
    }
    if tokens.x.dim() == 2 and states is not None:
        output = ops.gated_delta_step(*inputs, conv_state=states.conv, state=states.recurrent, **terms)
        return output.flatten(1).unsqueeze(1)
    if states is not None:
        terms.update(conv_state=states.conv, state=states.recurrent)
    output, conv, recurrent = ops.gated_delta_prefill(*inputs, **terms)
    if cache is not None:
        cache.update_conv_state(conv, module.layer_idx, conv_kernel_size=module.conv_kernel_size)
        cache.update_recurrent_state(recurrent, module.layer_idx)
    return output.flatten(2)


def _states(module: Any, cache: Any) -> DeltaStates | str | None:
    """Return the states in this cache, None if it has none yet, or why the call must be left to stock."""
    own = hasattr(type(cache), "_hf_rocm_slot")
    if not (own or type(cache).__module__ == _HOME) or module.layer_idx >= len(cache.layers):
        return f"the cache is of type {type(cache).__name__}, whose states only stock updates"
    layer = cache.layers[module.layer_idx]
    if type(layer).__module__ != _HOME or not hasattr(layer, "recurrent_states"):
        return f"the cache of this layer is of type {type(layer).__name__}, whose states only stock updates"
    if layer.record_past:
        return "the cache records past states"
    if not layer.has_previous_state[0]:
        return None
    conv, recurrent = layer.conv_states[0], layer.recurrent_states[0]
    return (
        "the cache has only one of the two states"
        if conv is None or recurrent is None
        else DeltaStates(conv, recurrent)
    )


_HOME = "transformers.cache_utils"


def _refuses(
    module: Any, x: Tensor, mask: Tensor | None, arguments: Mapping[str, Any], states: DeltaStates | None
) -> str | None:
    library = _library()
    if library is not None:
        return f"{library} is installed, and transformers uses it"
    if mask is not None and mask.shape != x.shape[:2]:
        return "the padding mask and the tokens have different shapes"
    if any(value is not None for name, value in arguments.items() if name in ("cu_seq_lens_q", "seq_idx")):
        return "the call has packed sequences, which are left to stock"
    if torch.is_autocast_enabled(x.device.type):
        return "under autocast, the gated delta rule is left to stock"
    if type(x) not in _PLAIN or (not (compiling() or compiler._is_compiling_flag) and left_to_pytorch(x)):
        return "another tool observes or transforms the call"
    conv, norm = module.conv1d, module.norm
    kind, layer_class = type(norm), type(module)
    if kind.__module__ != layer_class.__module__ or not kind.__name__.endswith("RMSNormGated"):
        return f"its norm is of type {kind.__name__}, which hf_rocm can't fuse"
    # A norm without this attribute calls F.silu.
    activations = (module.activation, getattr(norm, "activation", "silu"))
    if conv.bias is not None or any(name not in _ACTIVATIONS for name in activations):
        return "its convolution has a bias, or an activation is not silu"
    if _is_hooked(conv) or not is_plain(norm):
        return "a hook or another forward was set on its convolution or its norm"
    if not all(looks_up(layer_class, name, "silu") for name in activations):
        return "the activation 'silu' of transformers was replaced"
    tensors = (conv.weight, norm.weight, module.A_log, module.dt_bias, *(states or ()))
    if any(type(tensor) not in _PLAIN or tensor.device != x.device for tensor in tensors):
        return "its weights or states are not plain tensors on the input's device"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *tensors)):
        return "hf_rocm's gated delta rule has no gradient"
    if states is not None and (states.conv.dtype != x.dtype or states.conv.shape[2] != conv.weight.shape[2]):
        return "the states of the convolution have a different dtype or length"
    return _refused(x)


_ACTIVATIONS = ("silu", "swish")
_PLAIN = (Tensor, torch.nn.Parameter)


def _is_hooked(module: Any) -> bool:
    own = module.__dict__
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own or "_hf_hook" in own)


@constant_in_traces
def _library() -> str | None:
    return next((name for name in _LIBRARIES if sys.modules.get(name) is not None), None)


@constant_in_traces
def _refused(x: Tensor) -> str | None:
    return delta.refused_in(x)
