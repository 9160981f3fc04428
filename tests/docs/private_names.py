"""The private names of torch, transformers, Triton and accelerate in the package's sources, found in the syntax trees.

A name is private if it begins with an underscore and is not a dunder. Attributes, imported names and strings count
(`getattr(x, "_name")`, a key of `__dict__`, a name to replace), unless a class of the package has a member of that
name.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LIBRARIES = ("torch", "transformers", "triton", "accelerate")

# Names of this package: the prefix of the attributes that it sets on modules, a folder, a module, and a suffix.
MARK = "_hf_rocm"
PREPARED = {"_overlays", "_active", "_bias"}

# Names that begin with an underscore in Python's own named tuples
TUPLES = {name for name in dir(namedtuple("Any", "field")) if name.startswith("_")}

# Sources that search for names in other programs without using them
READERS = "hf_rocm/tools/porting/"


@dataclass
class Names:
    """The uses of private names. members: names that are also members of a class of the package."""

    used: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    members: set[str] = field(default_factory=set)

    @property
    def foreign(self) -> dict[str, list[str]]:
        """The names that only libraries define."""
        return {name: places for name, places in self.used.items() if name not in self.members}


def collect(sources: dict[str, str]) -> Names:
    """Collect the private names in these sources. sources: path → text."""
    names = Names()
    for path, text in sources.items():
        tree = ast.parse(text)
        names.members |= set(_members(tree))
        for name, line in _used(tree, strings=not path.startswith(READERS)):
            if is_private(name) and not name.startswith(MARK) and name not in PREPARED | TUPLES:
                names.used[name].append(f"{path}:{line}")
    return names


def read(root: Path, *folders: str) -> dict[str, str]:
    """Read all Python sources in these folders of root. Returns path → text."""
    files = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
    return {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files}


def is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_{1,2}[A-Za-z]\w*", name)) and not name.endswith("__")


def _members(tree: ast.Module) -> Iterator[str]:
    """Methods and fields of the classes, and attributes that their methods set on self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield statement.name
                targets = (
                    statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
                )
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            for statement in ast.walk(node):
                if (
                    isinstance(statement, ast.Attribute)
                    and isinstance(statement.ctx, ast.Store)
                    and _is(statement.value, "self")
                ):
                    yield statement.attr


def _used(tree: ast.Module, *, strings: bool) -> Iterator[tuple[str, int]]:
    """(name, line) of every identifier that a library may define."""
    imported = dict(_imported(tree))
    skipped = _docstrings(tree) | set(_pieces(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _of_library(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield from _of_library(f"{node.module}.{alias.name}", node.lineno)
        elif isinstance(node, ast.Attribute):
            root = imported.get(_root(node), LIBRARIES[0]).split(".")[0]
            # Attributes of modules of the standard library and of this package are skipped.
            if root in LIBRARIES:
                yield node.attr, node.lineno
        elif strings and node not in skipped and re.fullmatch(r"[\w.:]+", _text(node)):
            yield from ((part, node.lineno) for part in re.split("[.:]", _text(node)))


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _of_library(dotted: str, line: int) -> Iterator[tuple[str, int]]:
    root, *rest = dotted.split(".")
    if root in LIBRARIES:
        yield from ((part, line) for part in rest)


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name in this file, imported name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _docstrings(tree: ast.Module) -> set[ast.AST]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, kinds) and node.body]
    return {body[0].value for body in bodies if isinstance(body[0], ast.Expr)}


def _pieces(tree: ast.Module) -> Iterator[ast.AST]:
    """Parts of f-strings that are not complete names, such as `_bias` in `{name}_bias`. A part is a complete name if
    it follows a module-level constant whose value ends with `.` or `:`.
    """
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and _is_name(node.targets[0]) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for before, part in zip([None, *node.values], node.values, strict=False):
                start = before.value if isinstance(before, ast.FormattedValue) else before
                prefix = constants.get(start.id, "") if isinstance(start, ast.Name) else ""
                if not str(prefix).endswith((".", ":")):
                    yield part


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)
