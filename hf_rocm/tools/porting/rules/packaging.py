"""The requirements in setup.py and setup.cfg."""

from __future__ import annotations

import ast
import configparser
from collections.abc import Iterator

from hf_rocm.tools.porting.findings import Place
from hf_rocm.tools.porting.module import Context, Module
from hf_rocm.tools.porting.rules import requirements


def setup_calls(module: Module) -> Iterator[Place]:
    """Check install_requires and setup_requires of setup(…), even if the list is a variable."""
    for node, context in module.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        if (module.name(node.func) or "").rpartition(".")[2] != "setup":
            continue
        for keyword in node.keywords:
            if keyword.arg in ("install_requires", "setup_requires"):
                yield from _required(module, keyword.value, context)


def _required(module: Module, node: ast.expr, context: Context) -> Iterator[Place]:
    value = module.assigned(node.id, context) if isinstance(node, ast.Name) else node
    for item in value.elts if isinstance(value, ast.List | ast.Tuple) else ():
        if isinstance(item, ast.Constant) and isinstance(item.value, str) and not module.guarded(module.contexts[item]):
            yield from requirements.of_requirement(item.value, item.lineno)


def of_setup_cfg(text: str) -> Iterator[Place]:
    """Yield findings in a setup.cfg. Raises ValueError if `text` can't be parsed."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise ValueError(error.message.splitlines()[0]) from error
    lines = {line.strip(): number for number, line in reversed([*enumerate(text.splitlines(), 1)])}
    for line in parser.get("options", "install_requires", fallback="").splitlines():
        if line.strip():
            yield from requirements.of_requirement(line.strip(), lines.get(line.strip(), 1))
