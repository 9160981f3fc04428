"""The text of a definition in every release of transformers, and its changes between releases.

The text is normalised as for a digest: it has no comments, docstrings or function annotations, and its layout is
uniform. A body that consists only of a docstring is shown as `pass`.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping

from hf_rocm.overlay.digest import EITHER

# Digest of a definition → the releases that have it; the oldest is first.
Forms = Mapping[str, tuple[str, ...]]
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def text_of(source: bytes | str, name: str) -> str:
    """The code of a top-level definition or of a class member, without docstrings and function annotations.

    `A|B` means the first one that exists. The text is empty if there is no such definition.
    """
    statements = ast.parse(source).body
    for alternative in name.split(EITHER):
        owner, _, member = alternative.partition(".")
        bound = [_plain(statement) for statement in statements if _binds(statement, owner)]
        if member:
            bound = [
                inner for cls in bound if isinstance(cls, ast.ClassDef) for inner in cls.body if _binds(inner, member)
            ]
        if bound:
            return "\n\n".join(ast.unparse(statement) for statement in bound)
    return ""


def changes(name: str, texts: Mapping[str, str], forms: Forms, known: Forms) -> Iterator[str]:
    """For each new version of a definition, yield its text, or the differences from the previous version.

    texts: digest → text. forms: all versions, the oldest first. known: the versions that were accepted before.
    """
    before: str | None = None
    for digest, releases in forms.items():
        lines = texts[digest].splitlines()
        if digest not in known:
            shown = lines if before is None else _difference(texts[before].splitlines(), lines)
            change = "is missing" if not lines else "is defined" if before is None else "has a new definition"
            first = f"{name} {change} in {releases[0]}"
            yield "\n".join([first, *(f"    {line}".rstrip() for line in shown)])
        before = digest


def _difference(before: list[str], after: list[str]) -> list[str]:
    return list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]


def _binds(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, _DOCUMENTED):
        return statement.name == name
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return any((alias.asname or alias.name.split(".")[0]) == name for alias in statement.names)
    if isinstance(statement, (ast.If, ast.Try)):
        return any(
            _binds(inner, name)
            for inner in ast.walk(statement)
            if isinstance(inner, ast.stmt) and inner is not statement
        )
    targets: list[ast.AST] = [getattr(statement, "target", statement)]
    if isinstance(statement, ast.Assign):
        targets = [*statement.targets]
    return any(isinstance(node, ast.Name) and node.id == name for target in targets for node in ast.walk(target))


def _plain(statement: ast.stmt) -> ast.stmt:
    for node in ast.walk(statement):
        if isinstance(node, _DOCUMENTED):
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    return statement
