"""Compare the declarations of an aiter checkout with those in releases.json, and print the differences.

    python -m tests.aiter.record CHECKOUT VERSION

The command reads the sources and does not import aiter. It compares the names, the order and the defaults of arguments.
Defaults that are not literals are compared as None.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tests.aiter.recorded import DATA, RELEASES, declared

# The files that define the names in releases.json; the first one that defines a name is used.
FILES = {
    "mha_fwd": ("ops/mha.py",),
    "silu_and_mul": ("ops/activation.py",),
    "gelu_and_mul": ("ops/activation.py",),
    "gelu_tanh_and_mul": ("ops/activation.py",),
    "rms_norm": ("ops/rmsnorm.py",),
    "rmsnorm": ("ops/rmsnorm.py",),
    "rmsnorm2d_fwd_with_add": ("ops/rmsnorm.py",),
    "gemm_a16w16": ("tuned_gemm.py",),
    "gemm_a8w8": ("ops/gemm_op_a8w8.py",),
    "gemm_a8w8_bpreshuffle": ("ops/gemm_op_a8w8.py",),
    "rope_cached_2c_fwd_impl": ("ops/rope.py",),
    "flash_attn_func": ("ops/mha.py",),
    "flash_attn_varlen_func": ("ops/mha.py",),
    "ops.triton.attention.mha:flash_attn_func": ("ops/triton/attention/mha.py",),
}
# Decorators that register an operator; the first returns a function whose signature differs from the operator's.
OPERATORS = ("compile_ops", "torch_compile_guard")


def differences(checkout: Path, version: str) -> list[str]:
    """One entry per name whose declaration differs from the recorded one."""
    results = []
    for kind in ("operators", "functions"):
        for name in DATA[kind]:
            actual, expected = declaration(checkout, kind, name), declared(kind, version, name)
            if actual != expected:
                results.append(f"{kind} {name}\n  recorded  {expected}\n  found     {actual}")
    return results


def declaration(checkout: Path, kind: str, name: str) -> str | None:
    """The argument list of an operator or a plain function in a checkout's sources, or None if it is not defined."""
    for file in FILES[name]:
        path = checkout / "aiter" / file
        if not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == name.rpartition(":")[2]:
                decorators = [
                    decorator.func if isinstance(decorator, ast.Call) else decorator
                    for decorator in node.decorator_list
                ]
                names = {decorator.id for decorator in decorators if isinstance(decorator, ast.Name)}
                matches = bool(names & {*OPERATORS}) if kind == "operators" else "compile_ops" not in names
                return _arguments(node.args) if matches else None
    return None


def _arguments(arguments: ast.arguments) -> str:
    names = [arg.arg for arg in arguments.args]
    defaults = [_literal(default) for default in arguments.defaults]
    required = len(names) - len(defaults)
    return ", ".join([*names[:required], *map("{}={}".format, names[required:], defaults)])


def _literal(node: ast.expr) -> str:
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return "None"


def main(checkout: str, version: str) -> int:
    if version not in RELEASES:
        print(f"{version} is not in releases.json: compared with {RELEASES[-1]}", file=sys.stderr)
        version = RELEASES[-1]
    lines = differences(Path(checkout), version)
    print("\n".join(lines) or f"as recorded for {version}")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
