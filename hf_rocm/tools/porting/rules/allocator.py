"""Code that sets PYTORCH_CUDA_ALLOC_CONF, or a variable with the same meaning."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hf_rocm.tools.porting.findings import Place, Rule, Severity
from hf_rocm.tools.porting.module import Module

SPLIT = Rule(
    "allocator-split-size",
    Severity.WARNING,
    "max_split_size_mb stops the allocator from splitting large free blocks, so smaller requests can't reuse "
    "them; combined with expandable_segments on ROCm, it lets memory grow without bound",
    "leave it out, or use hf_rocm.setup_environment(); `hf-rocm doctor` tests the setting",
)
BOTH = Rule(
    "allocator-conflict",
    Severity.PROBLEM,
    "max_split_size_mb together with expandable_segments lets memory grow without bound on ROCm, and has corrupted "
    "data on some GPUs",
    "choose one; hf_rocm.setup_environment() sets what this machine supports",
)

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def split_size(module: Module) -> Iterator[Place]:
    """Yield findings for settings in os.environ, setdefault, putenv, setenv, a dict, or …_set_allocator_settings(…)."""
    for node, context in module.nodes(ast.Assign, ast.Call, ast.Dict):
        for value in _settings(module, node):
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and not module.guarded(context):
                yield from read(value.value, value.lineno)


def read(setting: str, line: int) -> Iterator[Place]:
    """Yield the findings for one setting."""
    if "max_split_size_mb" in setting:
        combined = "expandable_segments:true" in setting.lower().replace(" ", "")
        yield Place(BOTH if combined else SPLIT, line, setting)


def _settings(module: Module, node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_variable(target.slice):
                yield node.value
    elif isinstance(node, ast.Dict):
        yield from (value for key, value in zip(node.keys, node.values, strict=True) if _is_variable(key))
    elif isinstance(node, ast.Call):
        name = module.name(node.func) or ""
        if len(node.args) == 2 and _is_variable(node.args[0]) and name.endswith(("setdefault", "putenv", "setenv")):
            yield node.args[1]
        elif name.endswith("_set_allocator_settings") and node.args:
            yield node.args[0]


def _is_variable(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value in VARIABLES
