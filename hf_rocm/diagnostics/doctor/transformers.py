"""The transformers of this environment and its overlays, read from files."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hf_rocm.errors import HfRocmError


@dataclass(frozen=True)
class TransformersFacts:
    """kernels: the range of the `kernels` package that it asks for. overlays: how many files are in which state, as
    `yes/verified`; refused: why they could not be looked at, with the hint. outlook: whether to go on with a release
    that is newer than all that were checked."""

    version: str | None = None
    path: str = ""
    kernels: str | None = None
    overlays: Mapping[str, int] = field(default_factory=dict)
    outlook: str | None = None
    refused: str | None = None
    hint: str | None = None


def transformers_facts() -> TransformersFacts:
    from hf_rocm.overlay.catalog import load
    from hf_rocm.overlay.commands import status
    from hf_rocm.overlay.locate import locate
    from hf_rocm.overlay.outlook import outlook

    try:
        installation = locate()
    except HfRocmError as error:
        return TransformersFacts(refused=error.message, hint=error.hint)
    kernels = required(installation.root / "dependency_versions_table.py", "kernels")
    try:
        catalog = load()
        newer = outlook(installation, catalog)
        outside = newer is not None and not catalog.for_release(installation.version)
        states = [] if outside else status(catalog=catalog).states
    except HfRocmError as error:
        return TransformersFacts(
            installation.version, str(installation.root), kernels, refused=error.message, hint=error.hint
        )
    counted = Counter(f"{state.installed.value}/{state.match.value}" for state in states)
    verdict = newer.verdict if newer else None
    return TransformersFacts(installation.version, str(installation.root), kernels, dict(counted), verdict)


def required(table: Path, package: str) -> str | None:
    """The requirement of one package (`kernels>=0.18.2,<0.19`) in transformers' table of its dependencies."""
    try:
        tree = ast.parse(table.read_bytes())
    except (OSError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == package and isinstance(value, ast.Constant):
                    return str(value.value)
    return None
