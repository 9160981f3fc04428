"""Settings of torch.compile and of graph capture that behave differently on ROCm."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hf_rocm.tools.porting.findings import Place, Rule, Severity
from hf_rocm.tools.porting.module import Module

MODE = Rule(
    "compile-mode",
    Severity.WARNING,
    "this mode records graphs with inductor's CUDAGraph Trees; reports on ROCm range from a speed-up to wrong results",
    "mode='default', or hf_rocm.compile, whose settings are safe; measure before you use another mode",
)
SETTING = Rule(
    "inductor-setting",
    Severity.WARNING,
    "guides for ROCm recommend disabling inductor's graph recording and memory planning",
    "set it only if torch.version.hip is None, or let hf_rocm.compile set it",
)
CAPTURE = Rule(
    "random-state-in-capture",
    Severity.PROBLEM,
    "reading or setting the generator's state while a graph is recorded raises an error, or is not repeated by replays",
    "read it before the capture, and register the generator with graph.register_generator_state(…)",
)

_MODES = ("reduce-overhead", "max-autotune")
_OPTIONS = ("triton.cudagraphs", "triton.cudagraph_trees", "memory_planning")
_STATE = ("get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all", "manual_seed", "seed")


def modes(module: Module) -> Iterator[Place]:
    """Find `_MODES` and `_OPTIONS` in torch.compile (call, decorator or functools.partial) and in model.compile."""
    for node, context in module.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        if not _compiles(module, node) or module.guarded(context):
            continue
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg == "mode" and isinstance(value, ast.Constant) and value.value in _MODES:
                yield Place(MODE, value.lineno, f"mode={value.value!r}")
            elif keyword.arg == "options" and isinstance(value, ast.Dict):
                for key, setting in zip(value.keys, value.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value in _OPTIONS and _true(setting):
                        yield Place(SETTING, setting.lineno, f"options: {key.value!r}")


def inductor_settings(module: Module) -> Iterator[Place]:
    """Find torch._inductor.config.triton.cudagraphs = True, and similar settings."""
    for node, context in module.nodes(ast.Assign):
        assert isinstance(node, ast.Assign)
        for target in node.targets:
            name = module.name(target) or ""
            setting = name.removeprefix("torch._inductor.config.")
            if setting in _OPTIONS and setting != name and _true(node.value) and not module.guarded(context):
                yield Place(SETTING, node.lineno, f"{name} = True")


def random_state_in_capture(module: Module) -> Iterator[Place]:
    """Find torch.cuda.get_rng_state() and similar calls in a `with torch.cuda.graph(…)` block."""
    for node, context in module.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        name = module.name(node.func) or ""
        if not context.captured or module.guarded(context):
            continue
        if name.rpartition(".")[0] in ("torch.cuda", "torch", "torch.cuda.random", "torch.random") and (
            name.rpartition(".")[2] in _STATE
        ):
            yield Place(CAPTURE, node.lineno, f"{name}() in a capture")


def _compiles(module: Module, node: ast.Call) -> bool:
    name = module.name(node.func) or ""
    if name in ("functools.partial", "partial"):
        return bool(node.args) and module.name(node.args[0]) == "torch.compile"
    return name == "torch.compile" or (isinstance(node.func, ast.Attribute) and name.endswith(".compile") and (
        any(keyword.arg in ("mode", "options") for keyword in node.keywords)
    ))  # fmt: skip


def _true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
