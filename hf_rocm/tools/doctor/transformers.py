"""The installed transformers and its overlays, read from files."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_rocm.errors import HfRocmError


@dataclass(frozen=True)
class TransformersFacts:
    """The installed transformers.

    kernels: the requirement on the `kernels` package. overlays: the number of files per state, such as `yes/verified`.
    refused, hint: the reason why transformers was not located or its overlays could not be read, and the remedy.
    outlook: for a release that is newer than all checked ones, a sentence on whether to use it. hub_rope: the version
    of the Hub's rotary kernel that transformers uses on ROCm. hub_flash: whether transformers uses the Hub's flash
    attention on ROCm without passing attention sinks to it.
    """

    version: str | None = None
    path: str = ""
    kernels: str | None = None
    overlays: Mapping[str, int] = field(default_factory=dict)
    outlook: str | None = None
    refused: str | None = None
    hint: str | None = None
    hub_rope: int | None = None
    hub_flash: bool = False


def transformers_facts() -> TransformersFacts:
    from hf_rocm.overlay.catalog import load
    from hf_rocm.overlay.commands import status
    from hf_rocm.overlay.locate import locate
    from hf_rocm.overlay.newer_release import outlook

    try:
        installation = locate()
    except HfRocmError as error:
        return TransformersFacts(refused=error.message, hint=error.hint)
    kernels = required(installation.root / "dependency_versions_table.py", "kernels")
    hub = hub_facts(installation.root)
    try:
        catalog = load()
        newer = outlook(installation, catalog)
        outside = newer is not None and not catalog.for_release(installation.version)
        states = [] if outside else status(catalog=catalog).states
    except HfRocmError as error:
        return TransformersFacts(
            installation.version, str(installation.root), kernels, refused=error.message, hint=error.hint, **hub
        )
    counted = Counter(f"{state.installed.value}/{state.match.value}" for state in states)
    verdict = newer.verdict if newer else None
    return TransformersFacts(installation.version, str(installation.root), kernels, dict(counted), verdict, **hub)


def hub_facts(root: Path) -> dict[str, Any]:
    """Return the fields `hub_rope` and `hub_flash` of `TransformersFacts`, read from transformers' source files."""
    rope = re.search(r'"kernels-community/aiter-rope"[^)]*?version=(\d+)', _text(root / "integrations/hub_kernels.py"))
    flash = _text(root / "modeling_flash_attention_utils.py")
    return {
        "hub_rope": int(rope[1]) if rope else None,
        "hub_flash": "kernels-community/aiter-flash-attn" in flash and not re.search(r"[\"']sink[\"']", flash),
    }


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def required(table: Path, package: str) -> str | None:
    """Return the requirement on a package (`kernels>=0.18.2,<0.19`) in transformers' table of dependencies, or None."""
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
