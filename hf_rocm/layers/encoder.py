"""The layers of encoders: LayerNorm with the residual sum before it, as one operation.

Encoders normalise with `nn.LayerNorm`, which no overlay replaces. So the module is examined on every call: if the norm
or the dropout before the sum must be called, both are called as in the stock forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, compiler, nn

# Not from torch.nn, where the name may have been replaced.
from torch.nn.modules.normalization import LayerNorm

from hf_rocm import ops
from hf_rocm.layers.fallback_reasons import STAYED, note
from hf_rocm.layers.mlp import child
from hf_rocm.layers.norm import dropout_reason, is_plain
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.layer_norm import may_serve
from hf_rocm.ops.linear import left_to_pytorch

_PLAIN = (nn.Parameter, Tensor)
_call = nn.Module.__call__


@dataclass(frozen=True)
class PostNormOutput:
    """The end of a branch in BERT: norm(dropout(dense(x)) + residual). The fields are the names of the children."""

    dense: str = "dense"
    dropout: str = "dropout"
    norm: str = "LayerNorm"

    def forward(self, module: Any, stock: Callable[..., Any], x: Tensor, residual: Tensor) -> Tensor:
        """x: [..., K]; residual: [..., N]. Returns [..., N]."""
        output = child(module, self.dense)(x)
        return norm_of_sum(child(module, self.norm), output, residual, child(module, self.dropout))


@dataclass(frozen=True)
class PreNormEncoderLayer:
    """A layer of SigLIP or CLIP: x + attention(norm(x)), then the same with an MLP.

    norms: the names of the norms before attention and the MLP.
    """

    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")

    def forward(self, module: Any, stock: Callable[..., Any], x: Tensor, *args: Any, **arguments: Any) -> Any:
        """Run the layer. x: [B, S, K]. Returns what the stock layer returns.

        The stock forward runs while torch.compile or torch.export traces, if attention weights are requested, if there
        is no `attention_mask`, or if there are more positional arguments than the stock forward has.
        """
        if compiling() or compiler._is_compiling_flag:
            return stock(module, x, *args, **arguments)
        defaults, names, in_tuple = _signature(stock)
        keywords = {**defaults, **dict(zip(names, args, strict=False)), **arguments}
        if keywords.get("output_attentions") or len(args) > len(names) or "attention_mask" not in keywords:
            return stock(module, x, *args, **arguments)
        output, _ = module.self_attn(hidden_states=child(module, self.norms[0])(x), **keywords)
        normed, x = norm_and_sum(child(module, self.norms[1]), output, x)
        x = x + module.mlp(normed)
        return (x,) if in_tuple else x


def norm_of_sum(norm: Any, output: Tensor, residual: Tensor, dropout: Any = None) -> Tensor:
    """Compute norm(dropout(output) + residual), as one operation unless a module must be called."""
    terms = _terms(norm, output, residual, dropout)
    if terms is None:
        return norm(_sum(output, residual, dropout))
    return ops.add_layer_norm(output, residual, terms.weight, terms.bias, eps=terms.eps)[0]


def norm_and_sum(norm: Any, output: Tensor, residual: Tensor, dropout: Any = None) -> tuple[Tensor, Tensor]:
    """Return the result of `norm_of_sum`, and the sum itself, which is the next residual."""
    terms = _terms(norm, output, residual, dropout)
    if terms is not None:
        normed, total = ops.add_layer_norm(output, residual, terms.weight, terms.bias, eps=terms.eps, keep_sum=True)
        if total is not None:
            return normed, total
    total = _sum(output, residual, dropout)
    return norm(total), total


class _Terms(NamedTuple):
    """The arguments of a LayerNorm over the last dim."""

    weight: Tensor
    bias: Tensor | None
    eps: float


def _sum(output: Tensor, residual: Tensor, dropout: Any) -> Tensor:
    return (output if dropout is None else dropout(output)) + residual


def _terms(norm: Any, output: Tensor, residual: Tensor, dropout: Any) -> _Terms | None:
    """Return the arguments of the norm, or None if the modules must be called; for a LayerNorm, `explain` shows why.

    Returns None, without a reason, under torch.export and under torch.compile, which fuses the sum and the norm itself.
    """
    if norm.__class__ is not LayerNorm or compiling() or compiler._is_compiling_flag:
        return None
    terms = _terms_or_reason(norm, output, residual, dropout)
    if isinstance(terms, str):
        note(norm, terms)
        return None
    if STAYED in norm.__dict__:
        note(norm, None)
    return terms


def _terms_or_reason(norm: Any, output: Tensor, residual: Tensor, dropout: Any) -> _Terms | str:
    if not is_plain(norm) or nn.Module.__call__ is not _call:
        return "it has hooks or another forward, or a function that it calls was replaced"
    reason = None if dropout is None else dropout_reason(dropout)
    if reason is not None:
        return f"it can't be fused with the sum before it: {reason}"
    if left_to_pytorch(output) or residual.__class__ not in _PLAIN:
        return "it is called under autocast or by a tool that transforms the call"
    if output.dtype != residual.dtype or output.shape != residual.shape or output.device != residual.device:
        return "the two terms of the sum before it differ in dtype, shape or device"
    if not may_serve():
        return "aiter is required, and it has no LayerNorm of a sum"
    parameters = norm.__dict__["_parameters"]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    for one in (weight,) if bias is None else (weight, bias):
        if one.__class__ not in _PLAIN or one.dtype != output.dtype or one.device != output.device:
            return "its weights are not plain tensors of the input's dtype on its device"
        if one.shape != output.shape[-1:]:
            return "it normalises over several dims"
    return _Terms(weight, bias, norm.eps)


@cache
def _signature(stock: Callable[..., Any]) -> tuple[dict[str, Any], tuple[str, ...], bool]:
    """Return the defaults of a stock layer's arguments, the names of those after the hidden states, and whether the
    layer returns a tuple, as it does in releases in which it can return attention weights.
    """
    parameters = list(inspect.signature(stock).parameters.values())[2:]
    named = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    defaults = {one.name: one.default for one in named if one.default is not one.empty}
    names = tuple(parameter.name for parameter in named)
    return defaults, names, "output_attentions" in names
