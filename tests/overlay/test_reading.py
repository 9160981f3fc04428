"""transformers searches its own source files, and a block must not change the results."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from hf_rocm.overlay.block import stock_part
from hf_rocm.overlay.catalog import Catalog
from hf_rocm.overlay.commands import install
from tests.overlay.conftest import MODELS, Site, installed_package


def test_all_and_the_import_structure_are_unchanged(site: Site) -> None:
    from transformers.utils import import_utils

    models = site.root / "models"
    create = inspect.unwrap(import_utils.create_import_structure_from_path)
    before = {model: create(str(models / model)) for model in MODELS}
    exported = {model: import_utils.fetch__all__(site.model(model).read_text()) for model in MODELS}
    install(transformers_path=site.path)
    assert {model: create(str(models / model)) for model in MODELS} == before
    assert {model: import_utils.fetch__all__(site.model(model).read_text()) for model in MODELS} == exported
    assert all(exported.values())


def verdicts(code: str) -> dict[str, bool]:
    """Returns name → result of every search that transformers 4.56–4.57 and 5.x run in a module's source."""
    has_attention = bool(re.search(r"class \w+Attention\(nn.Module\)", code))
    is_attention = bool(re.search(r"^class \w*Attention\w*\(nn\.Module\):", code, re.MULTILINE))
    return {
        "has attention": has_attention,
        "is attention": is_attention,
        "eager": "eager_attention_forward" in code,
        "by index": "ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]" in code,
        "by call": "ALL_ATTENTION_FUNCTIONS.get_interface(" in code,
        "experts": "@use_experts_implementation" in code,
        "export": "@auto_docstring" in code,
    }


@pytest.mark.parametrize("model", MODELS)
def test_the_search_for_the_attention_interface_is_unchanged(site: Site, model: str) -> None:
    before = verdicts(site.model(model).read_text(encoding="utf-8"))
    install([model], transformers_path=site.path)
    assert verdicts(site.model(model).read_text(encoding="utf-8")) == before


def test_no_overlay_contains_a_text_that_transformers_searches_for(catalog: Catalog) -> None:
    empty = verdicts("")
    for directory in catalog.directories:
        for path in directory.files.values():
            assert verdicts(path.read_text(encoding="utf-8")) == empty, path


@pytest.mark.parametrize("model", MODELS)
def test_a_block_binds_no_name_that_the_stock_file_uses(site: Site, model: str) -> None:
    import ast

    def bound(tree: ast.AST) -> set[str]:
        return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))} | {
            (alias.asname or alias.name.split(".")[0])
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }

    install([model], transformers_path=site.path)
    data = site.model(model).read_bytes()
    stock = stock_part(data)
    names = {node.id for node in ast.walk(ast.parse(stock)) if isinstance(node, ast.Name)}
    block = ast.parse(data[len(stock) :])
    imported = {
        alias.asname or alias.name
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers.")
        for alias in node.names
    }
    assert bound(block) - imported - names == bound(block) - imported, bound(block) & names


def test_the_searches_are_those_of_the_installed_release() -> None:
    """The test fails if a new release searches for something else."""
    source = (installed_package() / "modeling_utils.py").read_text(encoding="utf-8")
    patterns = {
        r"class \w+Attention\(nn.Module\)",
        r"^class \w*Attention\w*\(nn\.Module\):",
    }
    searches = {result for result in re.findall(r"re\.search\(r\"([^\"]*)\", code", source)}
    assert searches <= patterns
    literals = set(re.findall(r"\"([^\"]+)\" in code\b", source))
    tested = set(re.findall(r"\"([^\"]+)\" in code\b", Path(__file__).read_text(encoding="utf-8")))
    assert literals <= tested
