"""Imports of packages that work only with NVIDIA GPUs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hf_rocm.tools.porting.findings import Place, Rule, Severity
from hf_rocm.tools.porting.libraries import by_package
from hf_rocm.tools.porting.module import Module, words_of

IMPORT = Rule(
    "nvidia-only-import",
    Severity.PROBLEM,
    "the file can't be imported if this package or NVIDIA's driver is missing",
    "import it inside `try: … except ImportError`, or only `if torch.version.hip is None`",
)

# Package → words that occur in the names of flags for it, such as `HAS_TRT`, in addition to those of its own name.
_FLAGS = {"tensorrt": ("trt",), "torch_tensorrt": ("trt",), "pynvml": ("nvml",), "transformer_engine": ("te",)}


def imports(module: Module) -> Iterator[Place]:
    """Find module-level imports such as `import pynvml`, unless a condition guards them or their failure is handled."""
    for node, context in module.nodes(ast.Import, ast.ImportFrom):
        assert isinstance(node, ast.Import | ast.ImportFrom)
        if context.function is not None or context.absence or "checking" in context.words:
            continue
        for name in _imported(node):
            library = by_package(name)
            first = name.split(".")[0]
            if library is None or module.guarded(context, *words_of(name), *_FLAGS.get(first, ())):
                continue
            instead = f"{library.rocm}; or {IMPORT.instead}"
            yield Place(IMPORT, node.lineno, f"import {name}", f"{library.cuda}: {IMPORT.why}", instead)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if node.module and not node.level else []
