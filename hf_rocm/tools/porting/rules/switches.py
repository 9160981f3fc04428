"""TF32 and cuDNN flags, which have a different effect on ROCm, or no effect."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hf_rocm.tools.porting.findings import Place, Rule, Severity
from hf_rocm.tools.porting.module import Module

TF32 = Rule(
    "tf32-flag",
    Severity.NOTE,
    "TF32 is an NVIDIA format; on ROCm the flag has no effect, or enables hipBLASLt's XF32 on gfx942 only, so that "
    "results differ between machines",
    "set it only if torch.version.hip is None (as hf_rocm.setup_environment() does)",
)
BENCHMARK = Rule(
    "cudnn-benchmark",
    Severity.WARNING,
    "on ROCm this makes MIOpen search for the best kernel at a convolution's first use: minutes for many shapes",
    "set it only if torch.version.hip is None, or fill MIOpen's database in advance (MIOPEN_FIND_MODE)",
)
DISABLED = Rule(
    "cudnn-disabled",
    Severity.WARNING,
    "the flag disables MIOpen on ROCm: convolutions fall back to PyTorch's slow native kernels",
    "set it only if torch.version.hip is None",
)

_FLAGS = {
    "torch.backends.cuda.matmul.allow_tf32": (TF32, True),
    "torch.backends.cudnn.allow_tf32": (TF32, True),
    "torch.backends.cudnn.benchmark": (BENCHMARK, True),
    "torch.backends.cudnn.enabled": (DISABLED, False),
}


def flags(module: Module) -> Iterator[Place]:
    """Find flags that are set to the value in `_FLAGS`, unless a test of the platform guards the assignment."""
    for node, context in module.nodes(ast.Assign):
        assert isinstance(node, ast.Assign)
        for target in node.targets:
            rule, value = _FLAGS.get(module.name(target) or "", (None, None))
            assigned = node.value.value if isinstance(node.value, ast.Constant) else None
            if rule is not None and assigned is value and not module.guarded(context):
                yield Place(rule, node.lineno, f"{module.name(target)} = {value}")
