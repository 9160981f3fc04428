"""The canonical digest of a definition in Python source code, at top level or in a class.

Releases of transformers are compared by the code of their definitions, not by their version numbers. A digest ignores
layout, comments, docstrings and annotations, and is the same on every Python from 3.10 on (unlike `ast.dump`).
"""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

# Separates the names that a definition has in different releases.
EITHER = "|"
# The length of a digest, in hexadecimal digits.
_LENGTH = 16
_IGNORED = frozenset({"annotation", "ctx", "kind", "returns", "type_comment", "type_ignores", "type_params"})
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def digests(source: bytes | str, names: Iterable[str]) -> dict[str, str | None]:
    """Return the digest of every name, or None for a name that the module does not bind.

    A name may be a function, a class, an assignment or an import at top level, or an attribute of a class
    (`GenerationMixin._sample`). For a name that is bound more than once, or under `if` or `try`, the digest covers all
    of its bindings and their conditions. `A|B` has the digest of the first name that is bound. Raises
    `SyntaxError` if the source is not valid Python.
    """
    names = tuple(names)
    single = _digests(source, tuple(dict.fromkeys(part for name in names for part in name.split(EITHER))))
    bound = {name: [part for part in name.split(EITHER) if single[part] is not None] for name in names}
    return {name: single[bound[name][0]] if bound[name] else None for name in names}


# A command may read a file twice, and several overlays may depend on the same file.
@lru_cache(maxsize=256)
def _digests(source: bytes | str, names: tuple[str, ...]) -> Mapping[str, str | None]:
    with warnings.catch_warnings():
        # Do not report another project's invalid escapes.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    bound: dict[str, list[str]] = {name: [] for name in names}
    for name, canonical in _bindings(tree.body, names=bound.keys(), condition=""):
        bound[name].append(canonical)
    return {name: _hash("\n".join(forms)) if forms else None for name, forms in bound.items()}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def _bindings(
    body: list[ast.stmt], *, names: Iterable[str], condition: str, inside: str = ""
) -> Iterator[tuple[str, str]]:
    for statement in body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                name = inside + (alias.asname or alias.name.split(".")[0])
                if name in names:
                    yield name, f"{condition}import {_origin(statement)}:{alias.name}"
        elif isinstance(statement, (ast.If, ast.Try)):
            for inner, text in _branches(statement):
                yield from _bindings(inner, names=names, condition=condition + text, inside=inside)
        else:
            for name in _names_bound_by(statement):
                if inside + name in names:
                    yield inside + name, condition + "".join(_canonical(statement))
            if isinstance(statement, ast.ClassDef):
                owner = f"{inside}{statement.name}."
                if any(name.startswith(owner) for name in names):
                    yield from _bindings(statement.body, names=names, condition=condition, inside=owner)


def _branches(statement: ast.If | ast.Try) -> Iterator[tuple[list[ast.stmt], str]]:
    if isinstance(statement, ast.If):
        test = "".join(_canonical(statement.test))
        yield statement.body, f"if {test}: "
        yield statement.orelse, f"unless {test}: "
        return
    yield statement.body, "try: "
    for handler in statement.handlers:
        caught = "".join(_canonical(handler.type)) if handler.type else ""
        yield handler.body, f"except {caught}: "
    yield statement.orelse, "else: "
    yield statement.finalbody, "finally: "


def _origin(statement: ast.Import | ast.ImportFrom) -> str:
    if isinstance(statement, ast.Import):
        return ""
    return "." * statement.level + (statement.module or "")


def _names_bound_by(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, _DOCUMENTED):
        yield statement.name
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)) and isinstance(statement.target, ast.Name):
        yield statement.target.id


def _canonical(value: object) -> Iterator[str]:
    """Yield the pieces of a text that is equal for equal trees. Empty and ignored fields are omitted."""
    if isinstance(value, ast.AST):
        yield f"({type(value).__name__}"
        for name, child in ast.iter_fields(value):
            if name == "body" and isinstance(value, _DOCUMENTED):
                child = _without_docstring(child)
            elif name == "values" and isinstance(value, ast.JoinedStr):
                child = _joined(child)
            if name in _IGNORED or child is None or child == []:
                continue
            yield f" {name}="
            yield from _canonical(child)
        yield ")"
    elif isinstance(value, list):
        yield "["
        for child in value:
            yield from _canonical(child)
            yield ","
        yield "]"
    else:
        # ascii, not repr: which characters repr escapes depends on Python's Unicode tables
        yield ascii(value)


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string, with adjacent literals joined, because some releases of Python split them."""
    parts: list[ast.expr] = []
    for value in values:
        last = parts[-1] if parts else None
        if isinstance(value, ast.Constant) and isinstance(last, ast.Constant):
            parts[-1] = ast.Constant(str(last.value) + str(value.value))
        else:
            parts.append(value)
    return [part for part in parts if not (isinstance(part, ast.Constant) and part.value == "")]


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body
