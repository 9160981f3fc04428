"""A parsed Python file for the rules, with the guards of every statement and with names resolved through its imports.

The guards of a statement are the words in the conditions that decide whether it runs. These conditions are in the
`if`s, `while`s and conditional expressions that contain it, even in their `else`; in an earlier `if` of its block that
ends with `return`, `raise`, `continue` or `break`; in an earlier `assert`; in earlier operands of `and` and `or`; or in
a decorator. Each rule defines which words count: a condition with `hip` guards against every finding, one with `flash`
only against a missing flash-attn. `torch.cuda.is_available()` is not a guard, because it is true on ROCm.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hf_rocm.tools.porting.libraries import LIBRARIES


def words_of(package: str) -> set[str]:
    """Return the words of a package's name that make a condition a guard: all but `torch` and `cuda`."""
    return {*package.split(".")[0].split("_")} - {"torch", "cuda"}


# PACKAGES, FLAGS and PLATFORM: the words that rules look for in a guard. No other words are stored, so that contexts
# are small even in long files.
PACKAGES = frozenset(word for library in LIBRARIES for name in library.packages for word in words_of(name))
FLAGS = frozenset(("flash", "fa", "checking", "trt", "nvml", "te", "smi", "numba", "cupy", "fnuz"))
# In characters. Longer dotted names are ignored, because every use of the import would be resolved to the long name.
LONGEST_NAME = 300

PLATFORM = ("hip", "rocm", "amd", "amdgpu", "nvidia", "gfx", "hpu", "xpu", "npu", "mps", "musa")
VOCABULARY = PACKAGES | FLAGS | frozenset(PLATFORM)
_ABSENCE = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NONE: frozenset[str] = frozenset()
_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_OUTPUT_CALLS = frozenset((
    "print", "debug", "info", "warning", "warn", "error", "exception", "critical", "log", "write", "echo",
    "add_argument", "skip", "skipif", "format", "Option", "HTTPException",
))  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Context:
    """The context of a node. words: the words in the conditions around it. absence: whether it is in a `try` that
    handles a missing module. captured: whether it runs while a graph is captured. function: the innermost function, or
    None at module level.
    """

    words: frozenset[str] = frozenset()
    absence: bool = False
    captured: bool = False
    function: ast.AST | None = None


@dataclass
class Module:
    """A parsed file. Raises SyntaxError, or ValueError for null bytes on some versions of Python."""

    text: str
    # Local name → dotted name.
    names: dict[str, str] = field(default_factory=dict)
    contexts: dict[ast.AST, Context] = field(default_factory=dict)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    # Last value by function and name.
    _values: dict[tuple[ast.AST | None, str], ast.expr] = field(default_factory=dict)
    # Private function → whether every call is guarded.
    _helpers: dict[str, bool] = field(default_factory=dict)
    _words: dict[ast.AST, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text)
        self._enter(self.tree, Context())
        for node, context in self.contexts.items():
            self._import(node)
            self.parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith("_"):
                guarded = any(word in context.words for word in PLATFORM)
                self._helpers[node.func.id] = guarded and self._helpers.get(node.func.id, True)
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self._values[context.function, target.id] = node.value

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[tuple[ast.AST, Context]]:
        """Yield every node of these types with its context, parents before children."""
        return ((node, context) for node, context in self.contexts.items() if isinstance(node, kinds))

    def name(self, node: ast.AST | None) -> str | None:
        """Return the dotted name of an expression, with its first part resolved through the imports. Returns None if
        the expression is not a name.
        """
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.name(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return None

    def imports(self, package: str) -> bool:
        """Return whether the file imports a package, under any name."""
        return any(name.split(".")[0] == package for name in self.names.values())

    def called(self, node: ast.expr) -> str:
        """Return the last part of a function's name, even if its object has no name, such as `run` for f().run. Returns
        '' for other expressions.
        """
        if isinstance(node, ast.Attribute):
            return node.attr
        return (self.name(node) or "").rpartition(".")[2]

    def guarded(self, context: Context, *words: str) -> bool:
        """Return whether a condition around the node contains one of these words or a word for the platform.

        A node in a private function is also guarded if every call of that function in this file is in a condition that
        contains a word for the platform.
        """
        assert VOCABULARY.issuperset(words), words
        if any(word in context.words for word in (*PLATFORM, *words)):
            return True
        return self._helpers.get(getattr(context.function, "name", ""), False)

    def assigned(self, name: str, context: Context) -> ast.expr | None:
        """Return the last value assigned to a variable in this context's function, else at module level, or None."""
        return self._values.get((context.function, name)) or self._values.get((None, name))

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the enclosing nodes, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def shown(self, node: ast.AST) -> bool:
        """Return whether an expression is only displayed: printed, logged, or part of a message or an f-string."""
        for parent in self.above(node):
            if isinstance(parent, ast.FormattedValue | ast.Raise):
                return True
            if isinstance(parent, ast.Call) and parent.func is not node:
                called = getattr(parent.func, "attr", getattr(parent.func, "id", ""))
                if called in _OUTPUT_CALLS:
                    return True
            if isinstance(parent, ast.stmt):
                return isinstance(parent, ast.Assert) and parent.msg is node
            node = parent
        return False

    def expected(self, node: ast.AST) -> list[str | None]:
        """Return the exceptions that the `try`s around the node in its function catch; None for a bare `except`."""
        caught: list[str | None] = []
        for parent in self.above(node):
            if isinstance(parent, ast.Try) and _in_body(node, parent):
                caught += [self.name(kind) for handler in parent.handlers for kind in kinds(handler)]
            if isinstance(parent, _FUNCTIONS):
                break
            node = parent
        return caught

    def _import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                self._named(alias.asname or first, alias.name if alias.asname else first)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                self._named(alias.asname or alias.name, f"{node.module}.{alias.name}")

    def _named(self, local: str, name: str) -> None:
        if len(name) <= LONGEST_NAME:
            self.names[local] = name

    def _enter(self, node: ast.AST, context: Context) -> None:
        self.contexts[node] = context
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            self._within_test(node, context)
        elif isinstance(node, ast.BoolOp):
            self._operands(node.values, context)
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
        tests = [self._words_of(decorator) for decorator in getattr(node, "decorator_list", ())]
        inner = _with(context, words=context.words.union(*tests))
        if isinstance(node, _FUNCTIONS):
            inner = _with(inner, function=node)
        self._children(node, inner)

    def _within_test(self, node: ast.If | ast.IfExp | ast.While, context: Context) -> None:
        inside = _with(context, words=context.words | self._words_of(node.test))
        self._enter(node.test, context)
        for part in (node.body, node.orelse):
            if isinstance(part, list):
                self._block(part, inside)
            else:
                self._enter(part, inside)

    def _operands(self, values: Iterable[ast.expr], context: Context) -> None:
        for value in values:
            self._enter(value, context)
            context = _with(context, words=context.words | self._words_of(value))

    def _children(self, node: ast.AST, context: Context) -> None:
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self._block(value, context)
            else:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self._enter(child, context)

    def _block(self, statements: Iterable[ast.AST], context: Context) -> None:
        for statement in statements:
            self._enter(statement, context)
            if (isinstance(statement, ast.If) and statement.body and isinstance(statement.body[-1], _EXITS)) or (
                isinstance(statement, ast.Assert)
            ):
                context = _with(context, words=context.words | self._words_of(statement.test))

    def _words_of(self, test: ast.AST) -> frozenset[str]:
        """Return the words of VOCABULARY in a condition. Every node is visited once, even in nested conditions."""
        words = self._words.get(test)
        if words is None:
            words = _own_words(test).union(*(self._words_of(child) for child in ast.iter_child_nodes(test)))
            self._words[test] = words
        return words


def _own_words(node: ast.AST) -> frozenset[str]:
    """Return the words of VOCABULARY in one name or string, such as `flash` for `is_flash_attn_2_available`."""
    text, words = "", set()
    if isinstance(node, ast.Name):
        text = node.id
    elif isinstance(node, ast.Attribute):
        text = node.attr
        if text == "cuda" and isinstance(node.value, ast.Attribute) and node.value.attr == "version":
            # torch.version.cuda is None on ROCm.
            words.add("hip")
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    words.update(part.lower() for part in _WORD.findall(text))
    return VOCABULARY & words if words else _NONE


def kinds(handler: ast.ExceptHandler) -> list[ast.expr | None]:
    """Return the exceptions that a handler lists; [None] for a bare `except`."""
    return [*handler.type.elts] if isinstance(handler.type, ast.Tuple) else [handler.type]


def _with(context: Context, **changes: Any) -> Context:
    if all(getattr(context, name) == value for name, value in changes.items()):
        return context
    return replace(context, **changes)


def _in_body(node: ast.AST, parent: ast.Try) -> bool:
    return bool(parent.handlers) and getattr(node, "lineno", 0) < parent.handlers[0].lineno


def _expects_absence(node: ast.Try) -> bool:
    for handler in node.handlers:
        if any(kind is None or getattr(kind, "id", getattr(kind, "attr", "")) in _ABSENCE for kind in kinds(handler)):
            return True
    return False


def _records(expression: ast.expr) -> bool:
    """Return whether this context manager captures a graph."""
    if not isinstance(expression, ast.Call):
        return False
    called = expression.func
    if isinstance(called, ast.Attribute) and called.attr == "graph" and isinstance(called.value, ast.Attribute):
        return called.value.attr == "cuda"
    return isinstance(called, ast.Attribute) and called.attr in ("capture_graph", "graph_capture")
