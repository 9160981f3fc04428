"""GPU queries whose results have a different meaning on ROCm: compute capability, CUDA's version, and NVML."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hf_rocm.tools.porting.findings import Place, Rule, Severity
from hf_rocm.tools.porting.module import Module

CAPABILITY = Rule(
    "cuda-capability",
    Severity.WARNING,
    "on ROCm these are the numbers of the gfx target, (9, 0) on MI200 and (9, 4) on MI300X: a test for 8 or 9 passes, "
    "and the code after it may be for NVIDIA's Ampere or Hopper",
    "test torch.version.hip first, then get_device_properties(…).gcnArchName",
)
VERSION = Rule(
    "cuda-version",
    Severity.WARNING,
    "torch.version.cuda is None on ROCm: a test of its truth value is false, and comparing it with < or >=, or calling "
    "its methods, raises an error",
    "torch.cuda.is_available() for a GPU, torch.version.hip for ROCm and its release",
)
NVML = Rule(
    "nvml-call",
    Severity.PROBLEM,
    "NVML needs NVIDIA's driver: the first call raises NVMLError on an AMD machine",
    "torch.cuda.mem_get_info() and torch.cuda.utilization(), or AMD SMI (the amdsmi package)",
)

_CAPABILITY_CALLS = ("get_device_capability", "is_bf16_supported_by_capability")
_PROPERTIES = ("get_device_properties",)
_NUMBERS = ("major", "minor")


def capabilities(module: Module) -> Iterator[Place]:
    """Find get_device_capability()[0] >= 9, get_device_properties(0).major, and 'sm_90' in get_arch_list()."""
    for node, context in module.nodes(ast.Call, ast.Attribute, ast.Compare):
        if module.guarded(context) or module.shown(node):
            continue
        if isinstance(node, ast.Call) and _is_named(module, node.func, _CAPABILITY_CALLS):
            if _of_torch(module, node.func) and _decides(module, node):
                yield Place(CAPABILITY, node.lineno, f"{module.name(node.func)}()")
        elif isinstance(node, ast.Attribute) and node.attr in _NUMBERS:
            value: ast.expr | None = node.value
            if isinstance(value, ast.Name):
                value = module.assigned(value.id, context)
            if isinstance(value, ast.Call) and _is_named(module, value.func, _PROPERTIES) and _decides(module, node):
                yield Place(CAPABILITY, node.lineno, f"get_device_properties(…).{node.attr}")
        elif isinstance(node, ast.Compare) and _names_architecture(node):
            calls = [value for value in node.comparators if isinstance(value, ast.Call)]
            if any(_is_named(module, call.func, ("get_arch_list",)) for call in calls):
                yield Place(CAPABILITY, node.lineno, "get_arch_list() returns gfx targets on ROCm")


def versions(module: Module) -> Iterator[Place]:
    """Find `if torch.version.cuda:`, torch.version.cuda >= '12', and torch.version.cuda.split('.')."""
    for node, context in module.nodes(ast.Attribute):
        if module.name(node) != "torch.version.cuda" or module.guarded(context) or module.shown(node):
            continue
        if _uses(module, node):
            yield Place(VERSION, node.lineno, "torch.version.cuda")  # type: ignore[attr-defined]


def nvml(module: Module) -> Iterator[Place]:
    """Find, in every function and at module level, the first NVML call without a guard and outside `try … except`."""
    seen: set[ast.AST | None] = set()
    for node, context in module.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        called = module.called(node.func)
        if not (called.startswith("nvml") and called[4:5].isupper()) or context.function in seen:
            continue
        if module.guarded(context, "nvml", "pynvml") or module.expected(node) or called == "nvmlShutdown":
            continue
        seen.add(context.function)
        yield Place(NVML, node.lineno, f"{called}()")


def _is_named(module: Module, node: ast.expr, names: tuple[str, ...]) -> bool:
    return module.called(node) in names


def _of_torch(module: Module, node: ast.expr) -> bool:
    """Return whether a function is torch's own, and not a wrapper in the project that may support ROCm."""
    return (module.name(node) or "").startswith(("torch.cuda.", "cuda."))


def _decides(module: Module, node: ast.AST) -> bool:
    """Return whether a value is compared, stored or returned, and not only reported."""
    for parent in module.above(node):
        if isinstance(parent, ast.Dict):
            return False
        if isinstance(parent, ast.stmt):
            return not isinstance(parent, ast.Expr) or _appends(parent)
    return True


def _appends(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Call) and getattr(node.value.func, "attr", "") in ("append", "add", "update")


def _names_architecture(node: ast.Compare) -> bool:
    left = node.left
    return isinstance(left, ast.Constant) and isinstance(left.value, str) and left.value.startswith(("sm_", "compute_"))


def _uses(module: Module, node: ast.AST) -> bool:
    """Return whether it matters that the version is None: it is tested, compared, split, stored or passed on."""
    parent = module.parents.get(node)
    if isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.Or) and parent.values[0] is node:
        # `… or ""` handles None.
        return any(isinstance(above, ast.Assert) for above in module.above(node))
    if isinstance(parent, ast.If | ast.While | ast.IfExp):
        return parent.test is node
    if isinstance(parent, ast.BoolOp | ast.UnaryOp | ast.Attribute | ast.Subscript | ast.Assign):
        return True
    if isinstance(parent, ast.Compare):
        return not all(isinstance(operator, ast.Is | ast.IsNot) for operator in parent.ops)
    if isinstance(parent, ast.Call):
        return module.called(parent.func) not in ("str", "repr", "bool", "append", "join", "get")
    return False
