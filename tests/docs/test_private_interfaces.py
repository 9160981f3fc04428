"""docs/private-interfaces.md lists exactly the private names of libraries that the sources use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM

import hf_rocm
from tests.docs.private_names import collect, is_private, read

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "private-interfaces.md"


def rows():
    """The cells of every row of every table."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def listed():
    return [name for cells in rows() for name in re.findall("`([^`]+)`", cells[0])]


PRIVATE = {part for name in listed() for part in name.split(".") if is_private(part)}


@pytest.fixture(scope="module")
def names():
    return collect(read(ROOT, "hf_rocm", "overlays"))


def test_every_private_name_is_listed(names):
    missing = {name: places[:3] for name, places in names.foreign.items() if name not in PRIVATE}
    assert not missing, (
        f"add to docs/private-interfaces.md, with what happens in a release that lacks the name: {missing}"
    )


def test_every_listed_name_is_used(names):
    unused = sorted(PRIVATE - set(names.used))
    assert not unused, f"remove from docs/private-interfaces.md: {unused}"
    sources = "\n".join(read(ROOT, "hf_rocm").values())
    others = {name.split(".")[-1] for name in listed() if not any(map(is_private, name.split(".")))}
    assert not {name for name in others if not re.search(rf"\b{name}\b", sources)}


def test_rows_are_complete_and_names_are_unique():
    assert len(rows()) > 40
    assert all(len(cells) == 3 and all(cells) for cells in rows())
    assert len(listed()) == len(set(listed()))


def test_methods_replaced_on_a_models_class_are_listed():
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = hf_rocm.prepare(LlamaForCausalLM(config).eval(), force=True)
    model.generate(torch.arange(1, 4)[None], max_new_tokens=3, do_sample=False)
    package = str(Path(hf_rocm.__file__).parent)
    replaced = {
        name
        for name, method in vars(type(model)).items()
        if hasattr(GenerationMixin, name)
        and str(getattr(getattr(method, "__code__", None), "co_filename", "")).startswith(package)
    }
    assert replaced, "no method of generation is replaced"
    assert replaced <= {name.split(".")[-1] for name in listed()}
    hf_rocm.restore(model)


SOURCE = '''
"""_in_a_docstring"""
import os, torch._imported, transformers.cache_utils as caches
from torch.nn import functional as F
from accelerate._inside import name

PREFIX = "transformers.utils:"

class Own:
    _field = 1

    def _method(self):
        self._set = getattr(F, "_by_string", None) or self._attribute

def use(model, name):
    os._exit(0)
    model._on_anything, model._method, model._set, caches._of_a_module, (1,)._replace
    return f"{PREFIX}_behind_a_constant", f"{name}_suffix", "_hf_rocm_mark", "a sentence with _words", "a.b._dotted"
'''


def test_all_kinds_of_uses_are_found():
    names = collect({"hf_rocm/any.py": SOURCE})
    assert set(names.foreign) == {
        "_imported",
        "_inside",
        "_by_string",
        "_attribute",
        "_on_anything",
        "_of_a_module",
        "_behind_a_constant",
        "_dotted",
    }
    assert {"_method", "_set"} == set(names.used) - set(names.foreign)
    assert names.used["_imported"] == ["hf_rocm/any.py:3"]
