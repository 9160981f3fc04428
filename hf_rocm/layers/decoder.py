"""The decoder layer of most models: x + attention(norm(x)), then the same with an MLP.

A layer returns what stock returns, including the sum: no state is passed from one layer to the next. With few rows,
norms and sums are fused into the GEMMs; with many rows, the first sum and the second norm are one operation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from torch import Tensor, compiler, nn

from hf_rocm import ops
from hf_rocm.layers.norm import SEPARATE, PrenormResidual, RMSNorm, can_fuse, runs_only_forward
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.norm_add import one_kernel
from hf_rocm.ops.rope_into_cache import alike
from hf_rocm.overlay.bind import GPU, MODE, OFF, Binding, bindings_by_class

_call = nn.Module.__call__


@dataclass(frozen=True)
class PreNormLayer:
    """A pre-norm layer: attention (`self_attn`) and an MLP, each with a norm before it and a residual sum after it.

    norms: the names of the norms before attention and the MLP. post_norms: the names of the norms of their outputs,
    before the sums, or None. mlp: the name of the MLP; if it returns a tuple, as routed experts may, only the first
    item is used.
    """

    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, str] | None = None
    mlp: str = "mlp"

    def forward(self, module: Any, stock: Callable[..., Any], x: Tensor, *args: Any, **arguments: Any) -> Any:
        """Run the layer. x: [B, S, K]. Returns what the stock layer returns.

        The stock forward runs while torch.compile or torch.export traces, if outputs other than the hidden states are
        requested, if arguments other than x are positional, or if the mask or the position embeddings are missing.
        """
        if (
            args
            or "attention_mask" not in arguments
            or "position_embeddings" not in arguments
            or arguments.get("output_attentions")
            or arguments.get("output_router_logits")
            or compiling()
            or compiler._is_compiling_flag
        ):
            return stock(module, x, *args, **arguments)
        arguments.pop("output_router_logits", None)
        x = (self._fused if can_fuse(x) else self._separate)(module._modules, x, arguments)
        return (x,) if _in_tuple(stock) else x

    def _separate(self, children: dict[str, Any], x: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Run a layer whose GEMMs include neither norms nor sums, for example one with many rows."""
        first, second = children[self.norms[0]], children[self.norms[1]]
        attention, mlp = children["self_attn"], children[self.mlp]
        binding = direct(first, x)
        normed = first(x) if binding is None else binding.replacement(first, binding.stock, x)
        binding = direct(attention, x)
        if binding is None:
            output = attention(hidden_states=normed, **arguments)[0]
        else:
            if binding.old_name:
                _rename(arguments)
            output = binding.replacement(attention, binding.stock, normed, **arguments)[0]
        if self.post_norms is not None:
            output = children[self.post_norms[0]](output)
        terms = norm_terms(second, x) if output.dtype == x.dtype else None
        if terms is None:
            x = x + output
            normed = second(x)
        else:
            normed, x = ops.add_rms_norm(output, x, terms.weight, eps=terms.eps, one_plus=terms.one_plus)
        binding = direct(mlp, x)
        if binding is None or not binding.takes_fused:
            result = mlp(normed)
        else:
            result = binding.replacement(mlp, binding.stock, normed, fused=SEPARATE)
        output = result[0] if isinstance(result, tuple) else result
        return x + (output if self.post_norms is None else children[self.post_norms[1]](output))

    def _fused(self, children: dict[str, Any], x: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Run a layer with few rows, with norms and sums fused into the GEMMs.

        A norm or sum is computed separately if a module must be called, for example because of its hooks.
        """
        after = (None, None) if self.post_norms is None else self.post_norms
        # The normalised x, if the previous operation has computed it.
        normed: Tensor | None = None
        for norm, name, post_norm in zip(self.norms, ("self_attn", self.mlp), after, strict=True):
            terms = norm_terms(children[norm], x) if normed is None else None
            branch = normed if normed is not None else children[norm](x) if terms is None else x
            fused = PrenormResidual(terms, x if post_norm is None else None)
            output = _branch(children[name], branch, fused, arguments if name == "self_attn" else None)
            if post_norm is None:
                x = fused.sum(output)
            else:
                following = children[self.norms[1]] if name == "self_attn" else None
                normed, x = _norm_add(children[post_norm], output, x, following)
        return x


def _norm_add(norm: Any, output: Tensor, x: Tensor, following: Any) -> tuple[Tensor | None, Tensor]:
    """Return (normed, sum), where sum is x + norm(output), and normed is `following` applied to it.

    normed is None if it has not been computed. following: the norm of the next branch, or None.
    """
    terms = norm_terms(norm, output) if output.dtype == x.dtype else None
    following_terms = None if following is None else norm_terms(following, x)
    for second in (following_terms, None):
        if terms is not None and one_kernel(output, x, terms, second):
            return ops.norm_add(output, x, terms, second)
    return None, x + norm(output)


def _branch(module: Any, x: Tensor, fused: PrenormResidual, arguments: dict[str, Any] | None) -> Tensor:
    """Run attention, which takes arguments, or the MLP. x: [B, S, K], before the norm in `fused`."""
    binding = unhooked_binding(module, x)
    if binding is not None and binding.takes_fused:
        if binding.old_name and arguments is not None:
            _rename(arguments)
        result = binding.replacement(module, fused.with_norm(binding.stock), x, fused=fused, **(arguments or {}))
    elif arguments is None:
        result = module(fused.normed(x))
    else:
        result = module(hidden_states=fused.normed(x), **arguments)
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def direct(module: Any, x: Tensor) -> Binding | None:
    """Like `unhooked_binding`, for a call without `nn.Module.__call__`: None if a tool has replaced that method."""
    return unhooked_binding(module, x) if nn.Module.__call__ is _call else None


def unhooked_binding(module: Any, x: Tensor) -> Binding | None:
    """Return the binding of the module if calling it with x would run only the binding's function, else None."""
    binding = bindings_by_class.get(module.__class__)
    if binding is None or not binding.change.live or module.__class__.__dict__["forward"] is not binding.dispatcher:
        return None
    own = module.__dict__
    mode = own.get(MODE, binding.mode)
    if mode == OFF or (mode == GPU and not x.is_cuda):
        return None
    if not runs_only_forward(own):
        return None
    watch = binding.watch
    if watch is not None and not watch.unchanged() and not watch.holds():
        return None
    return None if binding.methods and not binding.methods.isdisjoint(own) else binding


def norm_terms(module: Any, x: Tensor) -> ops.Norm | None:
    """Return the norm as an argument of operations that include it, or None if the module must be called for x."""
    binding = unhooked_binding(module, x)
    layer = None if binding is None else binding.layer
    return layer.terms(module, x) if isinstance(layer, RMSNorm) else None


def norm_pair(module: Any, norms: tuple[str, ...], query: Tensor) -> tuple[ops.Norm, ops.Norm] | Literal[False] | None:
    """Return the norms of queries and keys for one kernel, None if there are none, or False if they must be called."""
    children = [child for child in map(module._modules.get, norms) if child is not None] if norms else []
    if not children:
        return None
    if len(children) != 2:
        return False
    first, second = norm_terms(children[0], query), norm_terms(children[1], query)
    if first is None or second is None or not alike((first, second)):
        return False
    sizes = first.weight.shape, second.weight.shape
    return (first, second) if sizes == (query.shape[3:],) * 2 else False


def _rename(arguments: dict[str, Any]) -> None:
    """Rename the cache argument as the dispatcher would, because a direct call skips the dispatcher."""
    if "past_key_value" in arguments:
        arguments["past_key_values"] = arguments.pop("past_key_value")


@cache
def _in_tuple(stock: Callable[..., Any]) -> bool:
    """Return whether the stock layer returns a tuple, as in the releases in which it can return attention weights."""
    return "output_attentions" in inspect.signature(stock).parameters
