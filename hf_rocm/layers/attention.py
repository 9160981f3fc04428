"""Building blocks of attention forwards: the decision to serve a call, projections, heads, and the translation of
transformers' attention arguments to those of `ops.attention`.

`sdpa`, the default of transformers, and paged flash attention (see `pages`) are served. Any other implementation
that a user selects (eager, flash_attention_2, flex_attention) runs the stock forward. For models whose attention has
terms that SDPA lacks (softcap, sinks), transformers' default is `eager` (before 5.21, only for some of them). This
default can't be distinguished from a user's choice, so `eager` is served for these models too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, compiler, nn

from hf_rocm.layers import grouped_linear
from hf_rocm.layers.fallback_reasons import STAYED, note
from hf_rocm.layers.norm import PrenormResidual, dropout_reason
from hf_rocm.layers.pages import CACHE, Pages, is_flash
from hf_rocm.ops import decode
from hf_rocm.ops.attention import user_serves
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.mask_patterns import CacheRows, Padded, recognise
from hf_rocm.ops.registry import kernel_serves
from hf_rocm.ops.specs.attention import FEW_QUERIES, DecodeSpec
from hf_rocm.overlay.bind import bindings_by_class
from hf_rocm.overlay.replacements import Watch, constant_in_traces

SERVED = "sdpa"

# The attribute of a config behind its property `_attn_implementation`.
_IMPLEMENTATION = "_attn_implementation_internal"

# The attribute of a mask that contains the `CacheRows` of the visible keys.
_ROWS = "_hf_rocm_rows"

# (class, implementation) → the references through which the stock forward looks up its attention function, if any.
_interfaces: dict[tuple[type, str], Watch | None] = {}

# Arguments that change the result of attention and that overlays do not read, except the paged cache with `pages`.
_UNSERVED = (
    "output_attentions",
    "head_mask",
    "layer_head_mask",
    CACHE,
    "position_bias",
    "softcap",
    "s_aux",
    "past_key_value",
)


class Visibility(TypedDict):
    """The arguments of `ops.attention` that define which keys a query attends to."""

    causal: bool
    mask: Tensor | None
    padded: Padded | Pages | None


def fallback_reason(
    module: nn.Module,
    mask: object,
    arguments: Mapping[str, Any],
    *,
    dropout: float | nn.Module = 0.0,
    extra_reason: str | None = None,
    beyond_sdpa: bool = False,
    pages: bool = False,
) -> str | None:
    """Return why this call of an attention layer runs the stock forward, or None.

    mask: the attention mask that the model passes. arguments: the call's other keyword arguments. dropout: the
    probability that would be applied in training, or the module that stock calls. extra_reason: a reason from the
    overlay. beyond_sdpa: the model's attention has terms that SDPA lacks, so that transformers' default for it is
    `eager`. pages: the overlay serves paged flash attention, for which it passes `arguments` and the layer's terms to
    `visible_keys`.
    The reason is stored on the module for `explain`, except while torch.compile or torch.export traces.
    """
    reason = _reason(module, mask, arguments, dropout, beyond_sdpa, pages) or extra_reason
    traced = compiling() or compiler._is_compiling_flag
    if not traced and (reason is not None or STAYED in module.__dict__):
        note(module, reason)
    return reason


def _reason(
    module: nn.Module, mask: object, arguments: Mapping[str, Any], dropout: Any, beyond_sdpa: bool, pages: bool
) -> str | None:
    config = getattr(module, "config", None)
    implementation: object = SERVED
    traced = compiling() or compiler._is_compiling_flag
    if config is not None:
        try:
            # skips a property and transformers' `__getattribute__`, which take 2 µs; compilers can't trace this call
            implementation = None if traced else object.__getattribute__(config, _IMPLEMENTATION)
        except AttributeError:
            implementation = None
        if implementation is None:
            implementation = config._attn_implementation
    paged = pages and arguments.get(CACHE) is not None and mask is None and not traced and is_flash(implementation)
    if beyond_sdpa and implementation == "eager":
        if getattr(config, "output_attentions", False):
            return "the config requests attention weights, which only stock returns"
    elif implementation != SERVED and not paged:
        return f"the attention implementation {implementation!r} is selected, but only {SERVED!r} is served"
    if not _is_stock(module.__class__, str(implementation)):
        return implementation_replaced(module)
    if isinstance(dropout, nn.Module):
        if (reason := dropout_reason(dropout)) is not None:
            return reason
    elif module.training and dropout:
        return f"attention dropout ({dropout}) in training is left to stock"
    if mask is not None and not isinstance(mask, Tensor):
        return f"the attention mask is of type {type(mask).__name__}, not a tensor"
    for name in arguments:
        if name in _UNSERVED and (value := arguments[name]) is not None and value is not False:
            if paged and name == CACHE:
                continue
            label = "a paged cache (continuous batching)" if name == CACHE else name
            return f"the call has {label}, which is left to stock"
    return None


def implementation_replaced(module: nn.Module) -> str | None:
    """Return a sentence if the attention function that the stock forward looks up was replaced, else None."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", SERVED)
    watch = _watch(module.__class__, implementation)
    return None if watch is None else watch.difference()


@constant_in_traces
def _is_stock(cls: type, implementation: str) -> bool:
    """Return whether stock modules of this class would call transformers' own function for this implementation."""
    try:
        watch = _interfaces[cls, implementation]
    except KeyError:
        watch = _watch(cls, implementation)
    return watch is None or watch.unchanged() or watch.holds()


def _watch(cls: type, implementation: str) -> Watch | None:
    key = cls, implementation
    if key not in _interfaces:
        binding = bindings_by_class.get(cls)
        tables = () if binding is None else binding.registries
        references = [reference for table in tables for reference in table.references(implementation)]
        _interfaces[key] = Watch(references) if references else None
    return _interfaces[key]


def heads(
    module: Any,
    x: Tensor,
    *names: str,
    norms: tuple[str, ...] = (),
    head_dim: int | None = None,
    fused: PrenormResidual | None = None,
) -> tuple[Tensor, ...]:
    """Apply the named linear children and split their outputs into heads.

    x: [B, S, K]. norms: the children that normalise the first outputs over the head dim, in order; children that the
    module lacks are skipped. head_dim: default `module.head_dim`. fused: as passed by the decoder layer.
    Returns one tensor [B, heads, S, D] per name.
    """
    size = module.head_dim if head_dim is None else head_dim
    norm = None if fused is None else fused.norm
    parts = grouped_linear.project(module, x, norm=norm, head_dim=size)
    if parts is None:
        parts = split_heads(_separately(module, x, names, fused), size)
    return normed_heads(module, parts, norms)


def normed_heads(module: Any, parts: tuple[Tensor, ...], norms: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Call the norms of the first parts [B, heads, S, D]; children that the module lacks are skipped."""
    if not norms:
        return parts
    normed = list(parts)
    for index, name in enumerate(norms):
        child = module._modules.get(name)
        if child is not None:
            normed[index] = child(normed[index].transpose(1, 2)).transpose(1, 2)
    return tuple(normed)


def project(module: nn.Module, x: Tensor, *names: str, fused: PrenormResidual | None = None) -> tuple[Tensor, ...]:
    """Apply the named linear children of a module, which have the same input.

    x: [..., K]. fused: as passed by the decoder layer. Returns one [..., N_i] per name, in order; views of one tensor
    if the fused weights were used.
    """
    parts = grouped_linear.project(module, x, norm=None if fused is None else fused.norm)
    return _separately(module, x, names, fused) if parts is None else parts


def _separately(
    module: nn.Module, x: Tensor, names: tuple[str, ...], fused: PrenormResidual | None
) -> tuple[Tensor, ...]:
    if fused is not None:
        x = fused.normed(x)
    return tuple(module._modules[name](x) for name in names)  # type: ignore[misc]


def split_heads(parts: tuple[Tensor, ...], head_dim: int) -> tuple[Tensor, ...]:
    """Split tensors [B, S, heads · D] into heads. Returns views [B, heads, S, D]."""
    shape = (*parts[0].shape[:-1], -1, head_dim)
    return tuple(part.view(shape).transpose(1, 2) for part in parts)


def project_out(module: Any, output: Tensor, name: str = "o_proj", *, fused: PrenormResidual | None = None) -> Tensor:
    """Apply the output projection of an attention layer. output: [B, S, H · D]. fused: as in `heads`."""
    linear = module._modules[name]
    result: Tensor = linear(output) if fused is None else fused.last_gemm(linear, output)
    return result


def visible_keys(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    arguments: Mapping[str, Any],
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Visibility]:
    """Translate transformers' mask into the arguments of `ops.attention`.

    query: [B, H, S_q, D]. key: [B, Hkv, S_k, D]. value: [B, Hkv, S_k, D_v]. mask: transformers' mask, which includes
    causality, window and padding, or None for plain causal or full attention. window: the layer's sliding window.
    softcap, sinks: the arguments that `ops.attention` will get. These three arguments only help to select a kernel that
    needs no mask, except for a paged cache, which has no mask for the window.
    Returns (key, value, visibility); key and value may be shortened, but are never expanded.
    """
    if arguments.get(CACHE) is not None:
        return key, value, {"causal": False, "mask": None, "padded": Pages(module, arguments, window)}
    if mask is not None:
        terms = {"softcap": softcap is not None, "sinks": sinks is not None}
        rows = attached_rows(mask)
        padded: Padded | None
        if rows is None or mask.shape[2:] != (query.shape[2], key.shape[2]):
            padded = recognise(mask, query, key, value, window=window, **terms)
        else:
            # The mask changes with every step, but does not have to be read.
            padded = rows if _kernel_takes(rows, query, key, value, mask.dtype, **terms) else None
        return key, value, {"causal": False, "mask": mask, "padded": padded}
    requested = arguments.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if requested is None else requested)
    s_q, s_k = query.shape[2], key.shape[2]
    if causal and s_q > 1:
        config = getattr(module, "config", None)
        # stock's eager attention is causal only through its mask
        causal = config is None or config._attn_implementation != "eager"
    if causal and 1 < s_q < s_k:
        # There is no mask, and there are more keys than queries: transformers relies on SDPA's top-left alignment to
        # prefill an empty static cache. The keys beyond the queries have not been written yet.
        key, value = key[:, :, :s_q], value[:, :, :s_q]
    return key, value, {"causal": causal and s_q > 1, "mask": None, "padded": None}


def attach(mask: Tensor, rows: CacheRows) -> Tensor:
    """Attach the lengths and starts of the visible keys to a mask, for kernels that need no mask. Returns the mask.

    mask: [B, 1, S_q, S_k]. rows: the keys that these S_q queries attend to. If one of the two changes, the other must
    change in the same way.
    """
    setattr(mask, _ROWS, rows)
    return mask


def attached_rows(mask: Tensor) -> CacheRows | None:
    """Return the lengths and starts that `attach` has attached to this mask, or None."""
    rows: CacheRows | None = getattr(mask, _ROWS, None)
    return rows


def _kernel_takes(
    rows: CacheRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: torch.dtype,
    *,
    softcap: bool,
    sinks: bool,
) -> bool:
    """Return whether a kernel serves these lengths. Otherwise the existing mask, of this dtype, is used."""
    if compiling() or compiler._is_compiling_flag:
        # Attributes of a tensor are not part of the graph.
        return False
    spec = DecodeSpec(
        dtype=query.dtype,
        device=query.device,
        heads=query.shape[1],
        kv_heads=value.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        softcap=softcap,
        sinks=sinks,
        grad=torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
        one_query=query.shape[2] == 1,
        few_queries=query.shape[2] <= FEW_QUERIES,
        starts=rows.key_starts is not None,
        window=rows.window,
    )
    if not kernel_serves(decode._operation, tuple(spec)):
        return False
    # a kernel that the user registered for attention is preferred to hf_rocm's kernel for lengths
    by_user = decode._operation.choose(tuple(spec)).implementation.tier == "user"
    return by_user or not user_serves(query, key, value, mask, softcap=softcap, sinks=sinks)
