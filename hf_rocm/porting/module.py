"""A Python file as the rules read it: names resolved through its imports, and what guards each statement.

A statement is guarded by the words of every test that it stands under: the `if`s around it, an earlier `if` of its
block that left (`return`, `raise`), an `assert`, a decorator. Which words matter is for the rule to say: `hip` is a
guard against everything, `flash` against what flash-attn lacks. `torch.cuda.is_available()` is none: it is true on
ROCm.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

PLATFORM = ("hip", "rocm", "amd", "amdgpu", "nvidia", "gfx", "hpu", "xpu", "npu", "mps", "musa")
_ABSENCE = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Context:
    """Where a node stands. words: of the tests around it. absence: in a `try` that expects a missing module.
    captured: within the recording of a graph. function: the innermost one, or None at the top of the file.
    """

    words: frozenset[str] = frozenset()
    absence: bool = False
    captured: bool = False
    function: ast.AST | None = None


@dataclass
class Module:
    """The parsed file. Raises SyntaxError or ValueError (null bytes) where Python would."""

    text: str
    names: dict[str, str] = field(default_factory=dict)  # local name → dotted name
    contexts: dict[ast.AST, Context] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text)
        self._enter(self.tree, Context())
        for node in self.contexts:
            self._import(node)

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[tuple[ast.AST, Context]]:
        """Every node of these kinds with its context, in the order of the file."""
        return ((node, context) for node, context in self.contexts.items() if isinstance(node, kinds))

    def name(self, node: ast.AST | None) -> str | None:
        """The dotted name of an expression, with what its first part was imported as; None for anything else."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.name(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return None

    def guarded(self, context: Context, *words: str) -> bool:
        """Whether a test around the node asks for the platform, or for one of these words."""
        return any(word in context.words for word in (*PLATFORM, *words))

    def _import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                self.names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _enter(self, node: ast.AST, context: Context) -> None:
        self.contexts[node] = context
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            self._within_test(node, context)
        elif isinstance(node, ast.BoolOp):
            self._each_after(node.values, context)
        elif isinstance(node, ast.Try):
            inside = _with(context, absence=context.absence or _expects_absence(node))
            self._block(node.body, inside)
            for handler in node.handlers:
                self._enter(handler, context)
            self._block(node.orelse, inside)
            self._block(node.finalbody, context)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._enter(item, context)
            captured = context.captured or any(_records(item.context_expr) for item in node.items)
            self._block(node.body, _with(context, captured=captured))
        elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            self._enter_scope(node, context)
        else:
            self._children(node, context)

    def _enter_scope(self, node: ast.AST, context: Context) -> None:
        tests = [words_of(each) for each in getattr(node, "decorator_list", ())]
        inner = _with(context, words=context.words.union(*tests))
        if isinstance(node, _FUNCTIONS):
            inner = _with(inner, function=node)
        self._children(node, inner)

    def _within_test(self, node: ast.If | ast.IfExp | ast.While, context: Context) -> None:
        inside = _with(context, words=context.words | words_of(node.test))
        self._enter(node.test, context)
        for part in (node.body, node.orelse):
            if isinstance(part, list):
                self._block(part, inside)
            else:
                self._enter(part, inside)

    def _each_after(self, values: Iterable[ast.expr], context: Context) -> None:
        for value in values:
            self._enter(value, context)
            context = _with(context, words=context.words | words_of(value))

    def _children(self, node: ast.AST, context: Context) -> None:
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self._block(value, context)
            else:
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, ast.AST):
                        self._enter(each, context)

    def _block(self, statements: Iterable[ast.AST], context: Context) -> None:
        for statement in statements:
            self._enter(statement, context)
            if (isinstance(statement, ast.If) and statement.body and isinstance(statement.body[-1], _LEAVES)) or (
                isinstance(statement, ast.Assert)
            ):
                context = _with(context, words=context.words | words_of(statement.test))


def words_of(test: ast.AST) -> frozenset[str]:
    """The words of all names and strings in a test, in small letters: `is_flash_attn_2_available` has five."""
    found: set[str] = set()
    for node in ast.walk(test):
        text = ""
        if isinstance(node, ast.Name):
            text = node.id
        elif isinstance(node, ast.Attribute):
            text = node.attr
            if text == "cuda" and isinstance(node.value, ast.Attribute) and node.value.attr == "version":
                found.add("hip")  # torch.version.cuda is None on ROCm
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        found.update(part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text))
    return frozenset(found)


def kinds(handler: ast.ExceptHandler) -> list[ast.expr | None]:
    """The exceptions that a handler names; [None] for a bare `except`."""
    return [*handler.type.elts] if isinstance(handler.type, ast.Tuple) else [handler.type]


def _with(context: Context, **changes: Any) -> Context:
    return replace(context, **changes)


def _expects_absence(node: ast.Try) -> bool:
    for handler in node.handlers:
        if any(kind is None or getattr(kind, "id", getattr(kind, "attr", "")) in _ABSENCE for kind in kinds(handler)):
            return True
    return False


def _records(expression: ast.expr) -> bool:
    """Whether `with` this one records a graph."""
    if not isinstance(expression, ast.Call):
        return False
    called = expression.func
    if isinstance(called, ast.Attribute) and called.attr == "graph" and isinstance(called.value, ast.Attribute):
        return called.value.attr == "cuda"
    return isinstance(called, ast.Attribute) and called.attr in ("capture_graph", "graph_capture")
