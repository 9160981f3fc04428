"""Import rules, checked in the source: `import hf_rocm` is cheap, and packages are layered."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "hf_rocm"
SOURCES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"torch", "transformers", "accelerate", "aiter", "triton"}
# The only package that imports triton at module level.
KERNELS = "hf_rocm.ops.triton.kernels"
# modules with subclasses of transformers' classes, which need their bases at import time
SUBCLASSES = (
    "hf_rocm.generation.cache",
    "hf_rocm.generation.encoder_decoder",
    "hf_rocm.generation.layer_cache",
    "hf_rocm.generation.stop_criteria",
    "hf_rocm.generation.token_choice",
    "hf_rocm.loading.stored_quantizer",
)
# Maximum number of lines of a module.
CEILING = 400

# modules that run without a model: `import hf_rocm`, the command line, options, and installed blocks
CHEAP = ("hf_rocm", "hf_rocm.__main__", "hf_rocm.check_version", "hf_rocm.cli", "hf_rocm.options", "hf_rocm.overlay")
MAY_PRINT = ("hf_rocm.cli", "hf_rocm.check_version", "hf_rocm.__main__")

# The order of packages and top-level modules. Imports, including those inside functions and those for type checkers, go
# to the same or a later row.
ORDER = (
    ("__main__", "check_version", "cli"),
    ("tools",),
    ("loading",),
    ("forwards",),
    ("distributed", "generation"),
    ("weights",),
    ("layers",),
    ("ops",),
    ("environment", "features"),
    ("overlay",),
    ("patches",),
    ("architectures", "device", "known_faults"),
    ("arguments", "budget", "files", "option_values", "options", "tolerance"),
    ("variables",),
    ("errors",),
    # Every module may import the version from it.
    ("hf_rocm",),
)


@dataclass(frozen=True)
class Import:
    """One import of a module, and whether it is executed when the importing module is imported."""

    importer: str
    imported: str
    line: int
    at_import: bool
    # Whether only type checkers read it.
    for_types: bool = False

    @property
    def top(self) -> str:
        return self.imported.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def test_the_sources_exist() -> None:
    assert len(SOURCES) > 10, PACKAGE


def test_overlay_imports_neither_torch_nor_transformers() -> None:
    wrong = [edge for edge in _all_imports() if edge.importer.startswith("hf_rocm.overlay") and edge.top in HEAVY]
    assert not wrong, _listed(wrong)


def test_packages_import_downwards_only() -> None:
    rows = {package: number for number, row in enumerate(ORDER) for package in row}
    unplaced = {_package(name) for name, _ in _trees()} - rows.keys()
    assert not unplaced, f"add them to a row of ORDER: {sorted(unplaced)}"
    graph = _graph(_trees())
    upward = {
        (_short(importer), _short(imported))
        for importer, targets in graph.items()
        # hf_rocm itself imports every public name lazily.
        if importer != "hf_rocm"
        for imported in targets
        if rows[_package(imported)] < rows[_package(importer)]
    }
    assert upward == set(), "imports that go upwards"


def test_no_module_imports_itself_through_others() -> None:
    cycles = list(_cycles(_graph(_trees())))
    assert not cycles, [sorted(map(_short, cycle)) for cycle in cycles]


def test_only_tools_and_the_command_line_import_tools() -> None:
    above = {*ORDER[0], *ORDER[1]}
    wrong = [
        edge
        for edge in _all_imports()
        if edge.imported.startswith("hf_rocm.tools") and _package(edge.importer) not in above
    ]
    assert not wrong, _listed(wrong)


def test_import_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e"}}
    assert sorted(map(sorted, _cycles(graph))) == [["a", "b", "c"], ["e", "f"]]


def test_imports_for_type_checkers_close_cycles() -> None:
    sources = {
        "hf_rocm.norm": "from hf_rocm.kernels import kernel",
        "hf_rocm.kernels": "if TYPE_CHECKING:\n    from hf_rocm.norm import NormSpec",
    }
    trees = [(name, ast.parse(source)) for name, source in sources.items()]
    assert list(_cycles(_graph(trees))) == [set(sources)]


def test_ops_import_neither_weights_nor_what_builds_on_them() -> None:
    above = ("hf_rocm.weights", "hf_rocm.layers", "hf_rocm.loading.pretrained", "hf_rocm.cli")
    wrong = [
        edge for edge in _all_imports() if edge.importer.startswith("hf_rocm.ops") and _inside(edge.imported, above)
    ]
    assert not wrong, _listed(wrong)


def test_library_code_never_imports_the_command_line() -> None:
    wrong = [
        edge
        for edge in _all_imports()
        if _inside(edge.imported, ("hf_rocm.cli",)) and not _inside(edge.importer, MAY_PRINT)
    ]
    assert not wrong, _listed(wrong)


def test_transformers_aiter_and_triton_are_imported_inside_functions() -> None:
    wrong = [
        edge
        for edge in _all_imports()
        if edge.at_import
        and edge.top in HEAVY - {"torch"}
        and not (edge.top == "triton" and _inside(edge.importer, (KERNELS,)))
        and not (edge.top == "transformers" and edge.importer in SUBCLASSES)
    ]
    assert not wrong, _listed(wrong)


def test_modules_that_import_triton_are_imported_inside_functions() -> None:
    result = [edge for edge in _all_imports() if edge.imported.startswith(f"{KERNELS}.")]
    assert result, "the kernels are never imported"
    wrong = [edge for edge in result if edge.at_import and not _inside(edge.importer, (KERNELS,))]
    assert not wrong, _listed(wrong)


@pytest.mark.parametrize("start", CHEAP)
def test_cheap_modules_import_no_expensive_modules(start: str) -> None:
    at_import: dict[str, list[Import]] = {}
    for edge in _all_imports():
        if edge.at_import:
            at_import.setdefault(edge.importer, []).append(edge)
    reached, waiting = set[str](), [start]
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        for edge in at_import.get(module, []):
            assert edge.top not in HEAVY, f"{edge}; reached from {start} through {sorted(reached)}"
            waiting.append(edge.imported)
    assert start in reached


def test_only_options_reads_the_environment() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "environb")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and name != "hf_rocm.options"
    ]
    assert not wrong, wrong


def _names(caught: ast.expr | None) -> list[ast.AST]:
    return [] if caught is None else list(ast.walk(caught))


def test_only_the_command_line_prints_or_exits() -> None:
    wrong = []
    for name, tree in _trees():
        if _inside(name, MAY_PRINT):
            continue
        caught = {
            id(name) for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) for name in _names(node.type)
        }
        for node in ast.walk(tree):
            if id(node) in caught:
                # A failed build of aiter raises SystemExit, which must not end the user's program.
                continue
            if isinstance(node, ast.Name) and node.id in ("print", "exit", "quit", "SystemExit"):
                wrong.append(f"{name}:{node.lineno} {node.id}")
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.exit", "os._exit", "sys.stdout"):
                wrong.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_short_and_have_a_docstring(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= CEILING, f"{path.name} is too long: split it"
    assert ast.get_docstring(ast.parse(text)), f"{path.name} has no docstring"


def test_imports_at_import_time_and_at_call_time_are_distinguished() -> None:
    source = """
from __future__ import annotations
import torch.nn
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import accelerate
try:
    import triton
except ImportError:
    pass
def late():
    from aiter import ops
class Body:
    import transformers
"""
    edges = [edge for edge in _imports("hf_rocm.x", ast.parse(source)) if edge.top in HEAVY]
    assert {(edge.imported, edge.at_import, edge.for_types) for edge in edges} == {
        ("torch.nn", True, False),
        ("accelerate", False, True),
        ("triton", True, False),
        ("aiter", False, False),
        ("aiter.ops", False, False),
        ("transformers", True, False),
    }


@cache
def _trees() -> list[tuple[str, ast.Module]]:
    trees = []
    for path in SOURCES:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees.append((name, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return trees


@cache
def _all_imports() -> list[Import]:
    """Returns the package's imports that are executed at import time or in a call."""
    return [edge for edge in _edges(_trees()) if not edge.for_types]


def _edges(trees: list[tuple[str, ast.Module]]) -> list[Import]:
    modules = {name for name, _ in trees}
    result = [entry for name, tree in trees for entry in _imports(name, tree)]
    # `from hf_rocm import options` imports a module, but `from hf_rocm.options import current` imports a function
    return [edge for edge in result if edge.top != "hf_rocm" or edge.imported in modules]


def _graph(trees: list[tuple[str, ast.Module]]) -> dict[str, set[str]]:
    """The import graph, including imports for type checkers. `from hf_rocm.ops import probe` is an edge only to the
    module `hf_rocm.ops.probe`; parent packages are omitted.
    """
    graph: dict[str, set[str]] = {name: set() for name, _ in trees}
    statements: dict[tuple[str, int], set[str]] = {}
    for edge in _edges(trees):
        if edge.imported in graph and not f"{edge.importer}.".startswith(f"{edge.imported}."):
            statements.setdefault((edge.importer, edge.line), set()).add(edge.imported)
    for (importer, _), targets in statements.items():
        packages = {target for target in targets for other in targets if other.startswith(f"{target}.")}
        graph[importer] |= targets - packages
    return graph


def _cycles(graph: dict[str, set[str]]) -> Iterator[set[str]]:
    """Groups of modules that import each other."""
    reached = {start: _reachable(graph, start) for start in graph}
    waiting = {module for module in graph if module in reached[module]}
    while waiting:
        cycle = {other for other in reached[min(waiting)] if min(waiting) in reached[other]}
        waiting -= cycle
        yield cycle


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached, waiting = set[str](), list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += graph[module]
    return reached


def _package(module: str) -> str:
    """Returns the entry in ORDER for a module: the package or module directly below hf_rocm."""
    return _short(module).partition(".")[0]


def _short(module: str) -> str:
    return module.removeprefix("hf_rocm.")


def _imports(importer: str, tree: ast.AST, *, at_import: bool = True) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, node.lineno, at_import)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{importer}:{node.lineno}: imports must be absolute"
            yield Import(importer, node.module or "", node.lineno, at_import)
            for alias in node.names:
                yield Import(importer, f"{node.module}.{alias.name}", node.lineno, at_import)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for edge in _imports(importer, ast.Module(node.body, []), at_import=False):
                yield replace(edge, for_types=True)
            yield from _imports(importer, ast.Module(node.orelse, []), at_import=at_import)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(importer, node, at_import=at_import and not inside)


def _inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def _listed(wrong: list[Import]) -> str:
    return "\n".join(str(entry) for entry in wrong)
