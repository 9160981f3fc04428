"""Attention code that works only on NVIDIA GPUs, or that loses the savings of grouped-query attention."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections.abc import Iterator

from hf_rocm.tools.porting.findings import Place, Rule, Severity
from hf_rocm.tools.porting.module import Module

CALL = Rule(
    "flash-attn-call",
    Severity.WARNING,
    "the flash-attn package is a CUDA build unless it was compiled for ROCm, and this code doesn't check for that",
    "aiter.flash_attn_func (bottom-right causal too), torch's scaled_dot_product_attention, or "
    "attn_implementation='sdpa'",
)
EXPANDED = Rule(
    "expanded-key-value",
    Severity.WARNING,
    "key and value heads are copied once for each query head before attention: every decode step has the memory "
    "traffic that grouped heads are meant to avoid",
    "pass them as they are, with enable_gqa=True; aiter's and hf_rocm's attention accept grouped heads too",
)

NAMED = Rule(
    "flash-attention-name",
    Severity.WARNING,
    "with this name, transformers loads the flash-attn package, which has no wheel for ROCm: loading raises "
    "ImportError unless flash-attn was built for ROCm or hf_rocm serves it",
    "attn_implementation='sdpa', or hf_rocm.from_pretrained, which serves flash_attention_2 without flash-attn",
)

_NAMES = {"flash_attention_2", "flash_attention_3", "flash_attention"}
# These modules use only Triton or torch.
_PORTABLE = ("flash_attn.ops.triton", "flash_attn.utils", "flash_attn.bert_padding")
_SDPA = "scaled_dot_product_attention"


def flash_attention_calls(module: Module) -> Iterator[Place]:
    """Find calls to flash_attn's functions where neither the call nor the import is guarded."""
    guarded = _guarded_imports(module)
    for node, context in module.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        name = module.name(node.func) or ""
        if name.split(".")[0] not in ("flash_attn", "flash_attn_interface") or name.count(".") < 1:
            continue
        if name.startswith(_PORTABLE):
            continue
        local = _first(node.func)
        if local in guarded or context.absence or module.guarded(context, "flash", "fa"):
            continue
        yield Place(CALL, node.lineno, name)


def flash_attention_names(module: Module) -> Iterator[Place]:
    """Find settings such as attn_implementation='flash_attention_2' in arguments, defaults, dicts and assignments."""
    for name, expression in _named_values(module):
        for value in [expression.body, expression.orelse] if isinstance(expression, ast.IfExp) else [expression]:
            if not isinstance(value, ast.Constant) or module.guarded(module.contexts[value], "flash", "fa"):
                continue
            if value.value in _NAMES and re.search("attn|attention", name) and not module.shown(value):
                yield Place(NAMED, value.lineno, f"{name}={value.value!r}")
            elif value.value is True and name == "use_flash_attention_2":
                yield Place(NAMED, value.lineno, "use_flash_attention_2=True")


def _named_values(module: Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) for every keyword argument, default, assignment and dict entry."""
    for node, _ in module.nodes(ast.keyword, ast.Assign, ast.AnnAssign, ast.Dict, ast.arguments):
        if isinstance(node, ast.keyword):
            yield (_option(module, node) if node.arg == "default" else node.arg or ""), node.value
        elif isinstance(node, ast.Assign):
            yield _last(node.targets[0]), node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield _last(node.target), node.value
        elif isinstance(node, ast.Dict):
            yield from (
                (_last(key), value) for key, value in zip(node.keys, node.values, strict=True) if key is not None
            )
        elif isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args]
            last = named[len(named) - len(node.defaults) :]
            yield from ((name.arg, value) for name, value in zip(last, node.defaults, strict=True))
            keyword_only = zip(node.kwonlyargs, node.kw_defaults, strict=True)
            yield from ((name.arg, value) for name, value in keyword_only if value is not None)


def _option(module: Module, node: ast.keyword) -> str:
    """Return the name of the option to which a `default=` belongs, as in add_argument('--attn', default=…) or in
    `attn: str = field(default=…)`.
    """
    call = module.parents[node]
    if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
        return str(call.args[0].value)
    statement = module.parents.get(call)
    return _last(statement.target) if isinstance(statement, ast.AnnAssign) else ""


def _last(node: ast.expr) -> str:
    """Return the last part of an assignment's target, or a dict's key: `attn` for model.attn and options['attn']."""
    if isinstance(node, ast.Subscript):
        node = node.slice
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name if isinstance(name, str) else ""


def expanded_before_sdpa(module: Module) -> Iterator[Place]:
    """Find repeat_kv(k, n) or k.repeat_interleave(n, 1) whose result is passed to SDPA in the same function."""
    assigned: dict[tuple[ast.AST | None, str], list[tuple[int, bool]]] = {}
    for node, context in module.nodes(ast.Assign):
        assert isinstance(node, ast.Assign)
        for target in node.targets:
            if isinstance(target, ast.Name):
                history = assigned.setdefault((context.function, target.id), [])
                history.append((node.lineno, _expands(module, node.value)))
    seen: set[int] = set()
    for node, context in module.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        if not (module.name(node.func) or "").endswith(_SDPA):
            continue
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            line = argument.lineno if _expands(module, argument) else None
            if isinstance(argument, ast.Name):
                history = assigned.get((context.function, argument.id), [])
                # The last assignment before the call.
                latest = bisect_left(history, (node.lineno, False)) - 1
                line = history[latest][0] if latest >= 0 and history[latest][1] else None
            if line is not None and line not in seen:
                seen.add(line)
                yield Place(EXPANDED, line, f"expanded for the {_SDPA} on line {node.lineno}")


def _expands(module: Module, node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called == "repeat_kv":
        return True
    if called != "repeat_interleave":
        return False
    dims = [keyword.value for keyword in node.keywords if keyword.arg == "dim"]
    dims += node.args[2:3] if (module.name(node.func) or "").startswith("torch.") else node.args[1:2]
    # the dim of the heads in [B, H, S, D] or [H, S, D]
    return any(isinstance(dim, ast.Constant) and dim.value in (0, 1) for dim in dims) or any(
        isinstance(dim, ast.UnaryOp) and getattr(dim.operand, "value", 0) == 3 for dim in dims
    )


def _guarded_imports(module: Module) -> set[str]:
    """Return the local names from imports whose failure is handled or that are guarded."""
    guarded: set[str] = set()
    for node, context in module.nodes(ast.Import, ast.ImportFrom):
        assert isinstance(node, ast.Import | ast.ImportFrom)
        if context.absence or module.guarded(context, "flash", "fa"):
            guarded.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
    return guarded


def _first(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
