"""The decoder layer of most models: x + attention(norm(x)), then the same with an MLP.

What a layer returns is stock's, sum included: nothing is carried from one layer to the next. With few rows norms and
sums ride along with the products; with many, the first sum and the second norm are one operation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from hf_rocm import ops
from hf_rocm.layers.branch import Branch, by_stock, norm_terms, rides_along, runs_ours

_ASKED_FOR = ("output_attentions", "output_router_logits")
_EXPECTED = ("attention_mask", "position_embeddings")


def decoder_layer(
    module: Any,
    stock: Callable[..., Any],
    x: Tensor,
    args: tuple[Any, ...],
    arguments: dict[str, Any],
    *,
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    post_norms: tuple[str, str] | None = None,
    mlp: str = "mlp",
) -> Any:
    """For a layer that calls `self_attn` and an MLP, each after a norm and added to what came in.

    x: [B, S, K]; args, arguments: what else the layer was called with. norms: the children before attention and MLP;
    post_norms: those of their outputs, where there are any, before the sums. mlp: the child's name; where it returns
    more than its output, as a mixture may, the rest is dropped. Returns what the stock layer returns; it runs itself
    while torch.compile traces, and when more than the hidden states is asked for.
    """
    if is_compiling() or args or any(map(arguments.get, _ASKED_FOR)) or any(map(_lacks(arguments), _EXPECTED)):
        return stock(module, x, *args, **arguments)
    arguments.pop("output_router_logits", None)
    children = module._modules
    first, second = (children[name] for name in norms)
    after_attention, after_mlp = (None, None) if post_norms is None else (children[name] for name in post_norms)
    if rides_along(x):
        branch = _branch(first, x, post_norms is None)
        x = _joined(branch, _attend(children["self_attn"], branch, arguments), x, after_attention)
        branch = _branch(second, x, post_norms is None)
        x = _joined(branch, _feed(children[mlp], branch), x, after_mlp)
        return (x,) if _in_tuple(stock) else x
    output = children["self_attn"](hidden_states=first(x), **arguments)[0]
    normed, x = _summed_and_normed(second, output if after_attention is None else after_attention(output), x)
    output = _output(children[mlp](normed))
    x = x + (output if after_mlp is None else after_mlp(output))
    return (x,) if _in_tuple(stock) else x


@cache
def _in_tuple(stock: Callable[..., Any]) -> bool:
    """Whether the stock layer returns a tuple: it does in the releases where attention weights are asked of it."""
    return "output_attentions" in inspect.signature(stock).parameters


def _lacks(arguments: Mapping[str, Any]) -> Callable[[str], bool]:
    return lambda name: name not in arguments


def _branch(norm: Any, x: Tensor, adds: bool) -> Branch:
    terms = norm_terms(norm, x)
    return Branch(norm(x) if terms is None else x, terms, x if adds else None)


def _attend(attention: Any, branch: Branch, arguments: dict[str, Any]) -> Tensor:
    binding = runs_ours(attention, branch.x)
    if binding is None or not binding.fuses:
        output: Tensor = attention(hidden_states=branch.normed(), **arguments)[0]
        return output
    if binding.old_name and "past_key_value" in arguments:
        arguments["past_key_values"] = arguments.pop("past_key_value")
    ours: Tensor = binding.replacement(attention, partial(by_stock, binding.stock), branch, **arguments)[0]
    return ours


def _feed(mlp: Any, branch: Branch) -> Tensor:
    binding = runs_ours(mlp, branch.x)
    if binding is None or not binding.fuses:
        return _output(mlp(branch.normed()))
    output: Tensor = binding.replacement(mlp, partial(by_stock, binding.stock), branch)
    return output


def _joined(branch: Branch, output: Tensor, x: Tensor, post_norm: Any) -> Tensor:
    return branch.sum(output) if post_norm is None else x + post_norm(output)


def _summed_and_normed(norm: Any, output: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """norm(x + output), and the sum."""
    terms = norm_terms(norm, x) if output.dtype == x.dtype else None
    if terms is None:
        total = x + output
        return norm(total), total
    return ops.add_rms_norm(output, x, terms.weight, eps=terms.eps, one_plus=terms.one_plus)


def _output(result: Any) -> Tensor:
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output
