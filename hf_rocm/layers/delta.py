"""Linear attention with the gated delta rule: select the steps that the operation serves, and call it.

The prompt runs the stock forward. A step of one token updates the two states of its layer's cache in place, as stock
does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm import ops
from hf_rocm.layers.fallback_reasons import note
from hf_rocm.layers.grouped_linear import hooks_on_all
from hf_rocm.ops import delta
from hf_rocm.overlay.replacements import constant_in_traces

# Packages with kernels of their own, which transformers prefers to its PyTorch functions if they are installed.
_LIBRARIES = ("fla", "causal_conv1d")


class DeltaStates(NamedTuple):
    """The states of one layer: conv [B, C, K], the last inputs of its convolution; recurrent [B, H, D_k, D_v]."""

    conv: Tensor
    recurrent: Tensor


def delta_states(
    module: Any, x: Tensor, cache: Any, mask: Tensor | None, arguments: Mapping[str, Any]
) -> DeltaStates | None:
    """Return the states that this step updates, or None if the stock forward must run; `explain` shows the reason.

    module: the linear-attention layer, with the attributes of Qwen3-Next's layer. x: [B, S, K]. mask: the padding of x,
    or None. arguments: the call's other keyword arguments.
    """
    states = _states(module, x, cache)
    reason = states if isinstance(states, str) else _refuses(module, x, mask, arguments, states)
    note(module, reason)
    return None if reason is not None or isinstance(states, str) else states


def delta_step(module: Any, inputs: Sequence[Tensor], states: DeltaStates) -> Tensor:
    """Return `ops.gated_delta_step` with the weights of the layer as [B, 1, H · D_v].

    inputs: queries, keys, values, gates, and the logits of beta and decay, as the operation takes them.
    """
    norm = module.norm
    output = ops.gated_delta_step(
        *inputs,
        conv_weight=module.conv1d.weight.squeeze(1),
        conv_state=states.conv,
        state=states.recurrent,
        log_rate=module.A_log,
        bias=module.dt_bias,
        norm_weight=norm.weight,
        eps=norm.variance_epsilon,
    )
    return output.flatten(1).unsqueeze(1)


def _states(module: Any, x: Tensor, cache: Any) -> DeltaStates | str:
    if x.shape[1] != 1:
        return "the gated delta rule of several tokens is left to stock"
    if cache is None:
        return "the call has no cache"
    own = hasattr(type(cache), "_hf_rocm_slot")
    if not (own or type(cache).__module__ == _HOME) or module.layer_idx >= len(cache.layers):
        return f"the cache is a {type(cache).__name__}, whose states only stock updates"
    layer = cache.layers[module.layer_idx]
    if type(layer).__module__ != _HOME or not hasattr(layer, "recurrent_states"):
        return f"the cache of this layer is a {type(layer).__name__}, whose states only stock updates"
    conv, recurrent = layer.conv_states[0], layer.recurrent_states[0]
    if not layer.has_previous_state[0] or conv is None or recurrent is None:
        return "the cache has no states yet"
    return "the cache records past states" if layer.record_past else DeltaStates(conv, recurrent)


_HOME = "transformers.cache_utils"


def _refuses(
    module: Any, x: Tensor, mask: Tensor | None, arguments: Mapping[str, Any], states: DeltaStates
) -> str | None:
    library = _library()
    if library is not None:
        return f"{library} is installed, and transformers uses it"
    if mask is not None:
        return "the step has padding, which is left to stock"
    if any(value is not None for name, value in arguments.items() if name in ("cu_seq_lens_q", "seq_idx")):
        return "the call has packed sequences, which are left to stock"
    conv, norm = module.conv1d, module.norm
    if conv.bias is not None or module.activation not in ("silu", "swish"):
        return "its convolution has a bias or another activation"
    if hooks_on_all() or any(_is_hooked(child) for child in (conv, norm)):
        return "a hook or another forward was set on its convolution or its norm"
    tensors = (conv.weight, norm.weight, module.A_log, module.dt_bias, *states)
    if any(type(tensor) not in _PLAIN or tensor.device != x.device for tensor in tensors):
        return "its weights or states are not plain tensors on the input's device"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *tensors)):
        return "the gated delta rule has no gradient here"
    if states.conv.dtype != x.dtype or states.conv.shape[2] != conv.weight.shape[2]:
        return "the states of the convolution have another dtype or length"
    return _refused(x)


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
