"""Attention that is written for NVIDIA, or that throws away what grouped heads save."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hf_rocm.porting.findings import Place, Rule, Severity
from hf_rocm.porting.module import Module

CALL = Rule(
    "flash-attn-call",
    Severity.WARNING,
    "flash-attn's own package is a CUDA build unless ROCm's was compiled, and nothing here asks which",
    "aiter.flash_attn_func (bottom-right causal too), torch's scaled_dot_product_attention, or "
    "attn_implementation='sdpa'",
)
EXPANDED = Rule(
    "expanded-key-value",
    Severity.WARNING,
    "key and value heads are copied once for each query head before attention: the memory traffic that grouped heads "
    "were to save, at every decode step",
    "pass them as they are, with enable_gqa=True; aiter's and hf_rocm's attention take grouped heads too",
)

_EXPANDERS = ("repeat_kv", "repeat_interleave")
_SDPA = "scaled_dot_product_attention"


def flash_attention_calls(module: Module) -> Iterator[Place]:
    """Calls of flash_attn's functions that are neither guarded nor imported in a guard."""
    careful = _carefully_imported(module)
    for node, context in module.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        name = module.name(node.func) or ""
        if name.split(".")[0] not in ("flash_attn", "flash_attn_interface") or name.count(".") < 1:
            continue
        if name.startswith("flash_attn.ops.triton"):  # portable
            continue
        local = _first(node.func)
        if local in careful or context.absence or module.guarded(context, "flash", "fa"):
            continue
        yield Place(CALL, node.lineno, name)


def expanded_before_sdpa(module: Module) -> Iterator[Place]:
    """repeat_kv(k, n), or k.repeat_interleave(n, 1), whose result goes to SDPA in the same function."""
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
                before = [each for each in assigned.get((context.function, argument.id), ()) if each[0] < node.lineno]
                line = before[-1][0] if before and before[-1][1] else None
            if line is not None and line not in seen:
                seen.add(line)
                yield Place(EXPANDED, line, f"expanded for the {_SDPA} in line {node.lineno}")


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
    # the dim of the heads, in [B, H, S, D] and in [H, S, D]
    return any(isinstance(dim, ast.Constant) and dim.value in (0, 1) for dim in dims) or any(
        isinstance(dim, ast.UnaryOp) and getattr(dim.operand, "value", 0) == 3 for dim in dims
    )


def _carefully_imported(module: Module) -> set[str]:
    """Local names that came from an import which expects to fail, or that asks first."""
    found: set[str] = set()
    for node, context in module.nodes(ast.Import, ast.ImportFrom):
        assert isinstance(node, ast.Import | ast.ImportFrom)
        if context.absence or module.guarded(context, "flash", "fa"):
            found.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
    return found


def _first(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
