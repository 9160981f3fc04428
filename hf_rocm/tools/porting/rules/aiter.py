"""Mistakes in the use of aiter (AMD's kernels): unknown names, positional arguments, and `except ImportError`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hf_rocm.tools.porting.findings import Place, Rule, Severity
from hf_rocm.tools.porting.module import Module, kinds

UNKNOWN = Rule(
    "unknown-aiter-name",
    Severity.PROBLEM,
    "no release of amd-aiter from 0.1.1 to 0.1.20 has this name: using it raises AttributeError, or the code needs the "
    "unrelated asyncio package that is named aiter on PyPI",
    "see aiter's own modules; hf_rocm.ops calls the right function for the installed release",
)
VARIABLE = Rule(
    "unknown-aiter-variable",
    Severity.WARNING,
    "no release of amd-aiter reads this environment variable",
    "leave it out",
)
POSITIONAL = Rule(
    "aiter-positional-arguments",
    Severity.PROBLEM,
    "arguments were inserted in the middle of this function's signature more than once: passed by position, the "
    "values reach other parameters in another release",
    "pass everything after the tensors by keyword",
)
IMPORT = Rule(
    "aiter-import-error",
    Severity.WARNING,
    "on a machine without ROCm `import aiter` raises RuntimeError, which `except ImportError` doesn't catch",
    "check first (importlib.util.find_spec, torch.version.hip), or catch RuntimeError too",
)

_NAMES = {
    "matmul": "aiter.tuned_gemm.gemm_a16w16, whose weight is [N, K]",
    "linear": "aiter.tuned_gemm.gemm_a16w16",
    "attention": "aiter.flash_attn_func, with [B, S, H, D] tensors",
    "conv2d": "torch.nn.functional.conv2d (MIOpen)",
    "quantize": "aiter.get_hip_quant, or aiter.per_token_quant_hip",
    "register_kernel": "torch.library",
    "enable_dynamic_shapes": "nothing: its kernels need no setting for dynamic shapes",
    "dynamic_conv2d": "torch.nn.functional.conv2d",
    "set_log_level": "logging.getLogger('aiter').setLevel(…)",
    "__version__": "importlib.metadata.version('amd-aiter')",
    "tuned_gemm.gemm_a8w8": "aiter.gemm_a8w8",
}
# aiter.ops.attention is a module, so only calling it is wrong.
_MODULES = ("attention",)
_VARIABLES = ("AITER_CACHE_SIZE", "AITER_ENABLE_FUSION")

# Function → the number of leading tensors. The positions of later arguments differ between releases.
_MOVED = {"mha_fwd": 3, "fmha_v3_fwd": 3, "flash_attn_func": 3, "flash_attn_varlen_func": 7, "mha_batch_prefill": 3,
          "mha_batch_prefill_func": 3, "rmsnorm2d_fwd_with_add": 6}  # fmt: skip


def unknown_names(module: Module) -> Iterator[Place]:
    """Find aiter.matmul(…), `from aiter import linear`, and os.environ['AITER_CACHE_SIZE'] if aiter is imported."""
    if not any(name.split(".")[0] == "aiter" for name in module.names.values()):
        return
    for node, _ in module.nodes(ast.Attribute, ast.ImportFrom, ast.Constant):
        if isinstance(node, ast.ImportFrom) and node.module in ("aiter", "aiter.tuned_gemm") and not node.level:
            for alias in node.names:
                yield from _named(f"{node.module}.{alias.name}", node.lineno, called=alias.name not in _MODULES)
        elif isinstance(node, ast.Attribute):
            yield from _named(module.name(node) or "", node.lineno, called=node.attr not in _MODULES)
        elif isinstance(node, ast.Constant) and node.value in _VARIABLES:
            yield Place(VARIABLE, node.lineno, str(node.value))
    for node, _ in module.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        if module.name(node.func) in {f"aiter.{name}" for name in _MODULES}:
            yield from _named(module.name(node.func) or "", node.lineno, called=True)


def _named(name: str, line: int, *, called: bool) -> Iterator[Place]:
    instead = _NAMES.get(name.removeprefix("aiter.")) if name.startswith("aiter.") else None
    if instead is not None and called:
        yield Place(UNKNOWN, line, name, instead=instead)


def positional_arguments(module: Module) -> Iterator[Place]:
    """Find positional arguments after the tensors, as in aiter.mha_fwd(q, k, v, 0.0, scale, True, …)."""
    for node, _ in module.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        name = module.name(node.func) or ""
        tensors = _MOVED.get(name.rpartition(".")[2])
        if tensors is None or not name.startswith(("aiter.", "torch.ops.aiter.")):
            continue
        if len(node.args) > tensors and not any(isinstance(argument, ast.Starred) for argument in node.args):
            yield Place(POSITIONAL, node.lineno, f"{name} with {len(node.args)} positional arguments")


def expected_import_error(module: Module) -> Iterator[Place]:
    """Find an import of aiter in a `try` that handles only ImportError."""
    for node, context in module.nodes(ast.Try):
        assert isinstance(node, ast.Try)
        imported = [line for line in node.body if isinstance(line, ast.Import | ast.ImportFrom) and _of_aiter(line)]
        if not imported or module.guarded(context):
            continue
        names = [module.name(kind) for handler in node.handlers for kind in kinds(handler)]
        if names and all(name in ("ImportError", "ModuleNotFoundError") for name in names):
            yield Place(IMPORT, imported[0].lineno, "import aiter, expecting only ImportError")


def _of_aiter(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "aiter" for alias in node.names)
    return not node.level and (node.module or "").split(".")[0] == "aiter"
