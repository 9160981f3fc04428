"""Python kernels for NVIDIA GPUs: Numba, CuPy, CUDA sources in strings, Triton with PTX, and FP8."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hf_rocm.tools.porting.findings import Place, Rule, Severity, excerpt
from hf_rocm.tools.porting.module import Context, Module
from hf_rocm.tools.porting.rules import native

NUMBA = Rule(
    "numba-cuda",
    Severity.PROBLEM,
    "Numba compiles `numba.cuda` only for NVIDIA GPUs: the first launch raises an error",
    "numba-hip, AMD's fork (`from numba import hip; hip.pose_as_cuda()`), or a Triton kernel",
)
CUPY = Rule(
    "cupy",
    Severity.WARNING,
    "CuPy's wheels are built for CUDA; those for ROCm are experimental, and lack cuDNN and parts of cuSPARSE",
    "torch, or a cupy-rocm wheel behind `except ImportError`",
)
EXTRA = Rule(
    "triton-cuda-module",
    Severity.WARNING,
    "triton.language.extra.cuda calls NVIDIA's device library: a kernel that uses it does not compile on ROCm",
    "triton.language.extra.libdevice, which selects the functions for the current GPU",
)
WARPS = Rule(
    "triton-num-warps",
    Severity.PROBLEM,
    "on CDNA a warp has 64 lanes, so more than 16 warps exceed the limit of 1024 threads per workgroup",
    "num_warps of 16 or fewer, or half as many warps if torch.version.hip is set",
)
FP8 = Rule(
    "fp8-type",
    Severity.WARNING,
    "MI300X (gfx942) computes with the FNUZ types of FP8, with another exponent bias and a maximum of 240 in E4M3; the "
    "OCP types are for gfx950, gfx12 and NVIDIA",
    "choose float8_e4m3fnuz or float8_e4m3fn based on torch.cuda.get_device_properties(0).gcnArchName",
)

_FP8 = {"float8_e4m3fn", "float8_e5m2", "float8e4nv"}
_COMPILERS = ("load_inline", "RawKernel", "RawModule", "SourceModule", "ElementwiseKernel", "ReductionKernel")
_WARP_SIZE = re.compile(r"k?_?(?:threads_per_)?warp_?size|lanes_per_warp|threads_per_warp", re.IGNORECASE)
_OF_A_WARP = {(ast.BitAnd, 31), (ast.Mod, 32), (ast.FloorDiv, 32), (ast.RShift, 5)}
_GCN = re.compile(r"\b[vs]_\w+|\bds_\w+|\bglobal_(?:load|store|atomic)")


def numba_cuda(module: Module) -> Iterator[Place]:
    """Find unguarded `from numba import cuda` and `import numba.cuda`, in files that do not import numba.hip."""
    if any(name.startswith("numba.hip") for name in module.names.values()):
        return
    for node, context in module.nodes(ast.Import, ast.ImportFrom):
        if context.absence or module.guarded(context, "numba"):
            continue
        for name in _imported(node):
            if name == "numba.cuda" or name.startswith("numba.cuda."):
                yield Place(NUMBA, node.lineno, _shown(node, "cuda"))  # type: ignore[attr-defined]
                break


def cupy(module: Module) -> Iterator[Place]:
    """Find `import cupy`, unless a condition guards it or its failure is handled."""
    for node, context in module.nodes(ast.Import, ast.ImportFrom):
        if context.absence or module.guarded(context, "cupy") or "checking" in context.words:
            continue
        if any(name.split(".")[0] in ("cupy", "cupyx") for name in _imported(node)):
            yield Place(CUPY, node.lineno, _shown(node, "cupy"))  # type: ignore[attr-defined]


def triton(module: Module) -> Iterator[Place]:
    """Find PTX in tl.inline_asm_elementwise, uses of triton.language.extra.cuda, and num_warps above 16."""
    for node, context in module.nodes(ast.Call, ast.Import, ast.ImportFrom, ast.Attribute):
        if module.guarded(context) or context.absence:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in _imported(node):
                if name.startswith("triton.language.extra.cuda"):
                    yield Place(EXTRA, node.lineno, _shown(node, "cuda"))
                    break
        elif isinstance(node, ast.Attribute):
            if (module.name(node) or "").endswith("triton.language.extra.cuda"):
                yield Place(EXTRA, node.lineno, "triton.language.extra.cuda")
        elif isinstance(node, ast.Call):
            yield from _triton_call(module, node, context)


def _triton_call(module: Module, node: ast.Call, context: Context) -> Iterator[Place]:
    called = module.called(node.func)
    if called == "inline_asm_elementwise":
        sources = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "asm")]
        asm = _resolved(module, sources[0] if sources else None, context)
        if asm is None or not _GCN.search(asm):
            shown = "" if asm is None else excerpt(" ".join(asm.split()))
            yield Place(native.PTX, node.lineno, f"inline_asm_elementwise({shown!r})")
    for keyword in node.keywords:
        if keyword.arg == "num_warps" and isinstance(keyword.value, ast.Constant):
            number = keyword.value.value
            if isinstance(number, int) and number > 16 and module.imports("triton"):
                yield Place(WARPS, keyword.value.lineno, f"num_warps={number}")


def fp8(module: Module) -> Iterator[Place]:
    """Find OCP types of FP8, such as torch.float8_e4m3fn, where code uses them, in files without an FNUZ type."""
    if "fnuz" in module.text:
        return
    seen: set[int] = set()
    for node, context in module.nodes(ast.Attribute):
        assert isinstance(node, ast.Attribute)
        if node.attr not in _FP8 or node.lineno in seen or module.guarded(context) or module.shown(node):
            continue
        name = module.name(node) or ""
        if name.startswith(("torch.", "triton.language.", "tl.")) and _is_used(module, node):
            seen.add(node.lineno)
            yield Place(FP8, node.lineno, name)


def _is_used(module: Module, node: ast.AST) -> bool:
    """Return whether the code uses a type, rather than only comparing it or listing it in a table of types."""
    for parent in module.above(node):
        if isinstance(parent, ast.Compare | ast.Dict | ast.Set | ast.List | ast.Tuple | ast.Subscript):
            return False
        if isinstance(parent, ast.Call | ast.stmt):
            return not isinstance(parent, ast.Call) or getattr(parent.func, "id", "") not in ("isinstance", "hasattr")
    return False


def lanes(module: Module) -> Iterator[Place]:
    """Find `WARP_SIZE = 32`, `cuda.threadIdx.x % 32` and equivalents, in files that import a kernel language."""
    if not any(module.imports(package) for package in ("triton", "numba", "cupy", "cutlass", "tilelang", "pycuda")):
        return
    for node, context in module.nodes(ast.Assign, ast.BinOp):
        if module.guarded(context):
            continue
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            name = getattr(target, "id", getattr(target, "attr", ""))
            if _WARP_SIZE.fullmatch(str(name)) and getattr(node.value, "value", None) == 32:
                yield Place(native.LANES, node.lineno, f"{name} = 32")
        elif isinstance(node, ast.BinOp) and (module.name(node.left) or "").endswith(("threadIdx.x", "thread_idx.x")):
            if (type(node.op), getattr(node.right, "value", None)) in _OF_A_WARP:
                yield Place(native.LANES, node.lineno, _end_of(ast.unparse(node)))


def sources(module: Module) -> Iterator[Place]:
    """Apply the rules for source files to CUDA C++ in strings that load_inline, CuPy or PyCUDA compiles."""
    for node, context in module.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        called = module.called(node.func)
        if called not in _COMPILERS or module.guarded(context):
            continue
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            for part in argument.elts if isinstance(argument, ast.List | ast.Tuple) else [argument]:
                value = module.assigned(part.id, context) if isinstance(part, ast.Name) else part
                if isinstance(value, ast.Constant) and isinstance(value.value, str) and "\n" in value.value:
                    for place in native.of_native(value.value):
                        yield Place(place.rule, value.lineno + place.line - 1, place.what, place.why, place.instead)


def _resolved(module: Module, node: ast.expr | None, context: Context) -> str | None:
    if isinstance(node, ast.Name):
        node = module.assigned(node.id, context)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _imported(node: ast.AST) -> list[str]:
    """Return every dotted name that an import may refer to: numba and numba.cuda for `from numba import cuda`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _shown(node: ast.AST, name: str) -> str:
    """Return the statement on one line, shortened so that `name` stays visible."""
    text = " ".join(ast.unparse(node).split())
    word = re.search(rf"\b{name}", text)
    return excerpt(text, *word.span()) if word else excerpt(text)


def _end_of(text: str) -> str:
    """Return an expression, shortened so that its end stays visible, such as `& 31`."""
    return excerpt(text, len(text), len(text))
