"""Every module of hf_rocm has a test file: one named after it, one that imports it, or one from tests/index.toml."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
INDEX = ROOT / "tests" / "index.toml"
# Packages whose tests are not in the folder of the same name.
FOLDERS = {"ops/aiter": "aiter", "ops/triton": "triton", "ops/triton/kernels": "triton"}


def test_every_module_has_a_test_file() -> None:
    uncovered = {name for name, path in modules().items() if not covering(name, path)}
    assert not uncovered, f"add test files for these modules, or list them in tests/index.toml: {sorted(uncovered)}"


def test_the_index_is_sorted_and_its_files_exist() -> None:
    for group in index():
        assert group["reason"] and group["modules"] and group["tests"], group
        for names in (group["modules"], group["tests"]):
            assert names == sorted(set(names)), names
        missing = [name for name in group["tests"] if not (ROOT / name).is_file()]
        assert not missing, missing
        unknown = [name for name in group["modules"] if not any(matches(name, module) for module in modules())]
        assert not unknown, unknown
    first = [group["modules"][0] for group in index()]
    assert first == sorted(first)
    listed = [name for group in index() for name in group["modules"]]
    assert len(listed) == len(set(listed))


def test_the_index_lists_only_modules_without_their_own_test_file() -> None:
    redundant = {
        module
        for group in index()
        for name in group["modules"]
        for module, path in modules().items()
        if matches(name, module) and mirrored(path)
    }
    assert not redundant, f"remove from tests/index.toml: {sorted(redundant)}"


def covering(module: str, path: Path) -> set[str]:
    """The test files of a module, relative to the repository."""
    listed = {
        test for group in index() if any(matches(name, module) for name in group["modules"]) for test in group["tests"]
    }
    return mirrored(path) | importers().get(module, set()) | listed


def mirrored(path: Path) -> set[str]:
    """The test files named after a module: for hf_rocm/a/b/c.py, tests/a/b/test_c.py or tests/a/test_c.py."""
    relative = path.relative_to(ROOT / "hf_rocm")
    name, parent = relative.stem, relative.parent
    if name == "__init__":
        name, parent = parent.name, parent.parent
    folders = [FOLDERS.get(str(folder), str(folder)) for folder in (parent, parent.parent)]
    candidates = [ROOT / "tests" / folder / f"test_{name}.py" for folder in folders]
    return {str(file.relative_to(ROOT)) for file in candidates if file.is_file()}


def matches(listed: str, module: str) -> bool:
    """Whether an entry of the index, a module or `package.*`, includes a module."""
    return listed == module or (listed.endswith(".*") and module.startswith(listed[:-1]))


@cache
def modules() -> dict[str, Path]:
    """Every module with code, by its dotted name. An __init__.py with only a docstring is omitted."""
    result = {}
    for path in sorted((ROOT / "hf_rocm").rglob("*.py")):
        if any(not isinstance(statement, ast.Expr) for statement in ast.parse(path.read_bytes()).body):
            result[re.sub(r"\.__init__$", "", ".".join(path.relative_to(ROOT).with_suffix("").parts))] = path
    return result


@cache
def importers() -> dict[str, set[str]]:
    """The test files that import a module of hf_rocm, by the module's dotted name."""
    files: dict[str, set[str]] = {}
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for name in names:
                files.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return files


@cache
def index() -> list[dict[str, Any]]:
    return tomllib.loads(INDEX.read_text(encoding="utf-8"))["group"]
