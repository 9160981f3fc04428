"""scripts/new-overlay drafts overlays that work: they run in place of the shipped ones and give what stock gives."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm.overlay import catalog as catalogs
from hf_rocm.overlay.activate import deactivate
from hf_rocm.overlay.block import sha256
from hf_rocm.overlay.catalog import Catalog
from hf_rocm.overlay.digest import digests
from hf_rocm.overlay.manifest import Manifest, Record, dependencies, render
from tests.coverage.cases import CASES
from tests.coverage.hits import assert_served, counted, recording
from tests.coverage.inputs import in_float64, tokens
from tests.overlay.conftest import installed_package
from tests.overlay.test_scripts import load
from tests.tolerance import assert_run_as_good_as_eager

DIRECTORY = "transformers-4.0"  # none that is shipped, so that nothing shipped can be taken for a draft
DRAFTED = ("cohere", "gemma2", "glm4", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
WHOLE = [case for case in CASES if case.overlay in DRAFTED and case.here and not case.variant]
NEWEST = transformers.__version__.startswith("5.23")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("new-overlay")


@pytest.fixture
def overlays(tmp_path: Path) -> Path:
    (tmp_path / DIRECTORY).mkdir()
    (tmp_path / DIRECTORY / "manifest.toml").write_text('transformers = ">=4"\n')
    (tmp_path / "features.toml").write_text('transformers = ">=4"\n')
    return tmp_path


@pytest.fixture(autouse=True)
def unbound() -> Iterator[None]:
    deactivate()  # a model that an earlier test left active would be served by what is shipped
    yield
    deactivate()


def drafted(script: ModuleType, overlays: Path, model: str) -> Path:
    """Run the script on the installed transformers, and record the digests as scripts/refresh-digests does."""
    arguments = [model, "--stock", str(installed_package()), "--directory", DIRECTORY, "--overlays", str(overlays)]
    assert script.main(arguments) == 0
    file = overlays / DIRECTORY / "models" / model / f"modeling_{model}.py"
    stock = (installed_package() / "models" / model / f"modeling_{model}.py").read_bytes()
    here, names = (transformers.__version__,), {}
    for dependency in dependencies(file.read_text()):
        digest = digests(stock, [name := dependency.split(":")[1]])[name]
        assert digest is not None
        names[dependency] = {digest: here}
    manifest = Manifest(">=4", {model: Record({sha256(stock): here}, names)})
    (overlays / DIRECTORY / "manifest.toml").write_text(render(manifest))
    return file


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.id)
def test_a_draft_works(case, script: ModuleType, overlays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = drafted(script, overlays, case.overlay)
    made = Catalog(overlays)
    monkeypatch.setattr(catalogs, "load", lambda *_, **__: made)
    stock = case.build()
    exact, ours = copy.deepcopy(stock).double(), hf_rocm.prepare(copy.deepcopy(stock), force=True)
    bound = {binding.replacement.__code__.co_filename for binding in hf_rocm.overlay.bind.bindings()}
    assert bound == {str(file)}, "the draft runs, not what is shipped"

    def run(model):
        first = model(input_ids=tokens(2, 9), use_cache=True)
        second = model(input_ids=tokens(2, 1, seed=1), past_key_values=first.past_key_values, use_cache=True)
        return {"first": first.logits, "second": second.logits}

    with torch.inference_mode():
        with recording() as routes, counted() as hits:
            actual = run(ours)
        same_dtype = run(stock)
        with in_float64():
            expected = run(exact)
    assert_served(ours, case.classes(), routes, hits)
    assert_run_as_good_as_eager(actual, same_dtype, expected)


@pytest.mark.skipif(not NEWEST, reason="the shipped texts were written after this release")
@pytest.mark.parametrize("model", ["granite", "llama", "mistral", "qwen2"])
def test_a_draft_is_what_is_shipped(model: str, script: ModuleType, overlays: Path, catalog: Catalog) -> None:
    shipped = catalog.find(model, transformers.__version__)
    assert shipped is not None

    def functions(text: str) -> dict[str, str]:
        found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        return {node.name: ast.unparse(node) for node in found}

    assert functions(drafted(script, overlays, model).read_text()) == functions(shipped.text)


STOCK = """
class DemoRMSNorm(nn.Module):
    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon)).to(x.dtype)

class DemoAttention(nn.Module):
    def forward(self, hidden_states, attention_mask=None, **kwargs):
        query = self.q_proj(hidden_states).view(1, -1, 4, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden_states).view(1, -1, 4, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden_states).view(1, -1, 4, self.head_dim).transpose(1, 2)
        {0}
        attn_output, attn_weights = attention_interface(self, query, key, value, attention_mask{1}, **kwargs)
        attn_output = attn_output.reshape(1, -1, 64)
        return self.o_proj(attn_output), attn_weights

class DemoMLP(nn.Module):
    def forward(self, x):
        return self.down_proj({2})

class DemoExperts(nn.Module):
    def forward(self, x):
        return x
"""


def demo(tmp_path: Path, *parts: str) -> Path:
    folder = tmp_path / "site" / "transformers" / "models" / "demo"
    folder.mkdir(parents=True)
    (folder / "modeling_demo.py").write_text(STOCK.format(*parts))
    return folder.parents[1]


def draft(script: ModuleType, stock: Path):
    return script.from_stock("demo", "transformers-5.2", stock)


GATED = "self.act_fn(self.gate_proj(x)) * self.up_proj(x)"


def test_what_has_no_known_shape_is_left_out_with_the_line_that_is_new(script: ModuleType, tmp_path: Path) -> None:
    found = draft(
        script, demo(tmp_path, "query = query * torch.sigmoid(self.gate(hidden_states))", "", "self.up_proj(x)")
    )
    assert found.served == ("DemoRMSNorm",)
    assert found.left["DemoAttention"] == "query = query * torch.sigmoid(self.gate(hidden_states))"
    assert found.left["DemoMLP"] == "return self.down_proj(self.up_proj(x))"
    assert "DemoExperts" in found.left
    assert dependencies(found.text) == ["transformers.models.demo.modeling_demo:DemoRMSNorm"]


def test_a_term_of_the_attention_interface_that_is_not_known_is_never_dropped(
    script: ModuleType, tmp_path: Path
) -> None:
    found = draft(script, demo(tmp_path, "", ", scaling=self.scaling, new_term=self.bias", GATED))
    assert "new_term" in found.left["DemoAttention"] and found.served == ("DemoRMSNorm", "DemoMLP")


def test_terms_that_are_known_are_handed_on(script: ModuleType, tmp_path: Path) -> None:
    found = draft(script, demo(tmp_path, "", ", scaling=self.s, softcap=self.cap, s_aux=self.sinks", GATED))
    assert found.left.keys() == {"DemoExperts"}
    assert "scale=self.s, softcap=softcap, sinks=sinks, **seen" in found.text
    assert "beyond_sdpa=True" in found.text and 'fuses=("gate_proj", "up_proj")' in found.text


def test_a_table_of_classes_is_pointed_at(script: ModuleType, tmp_path: Path) -> None:
    stock = demo(tmp_path, "", "", GATED)
    file = stock / "models/demo/modeling_demo.py"
    file.write_text(file.read_text() + 'DEMO_CLASSES = {"eager": DemoAttention, "sdpa": DemoSdpaAttention}\n')
    assert draft(script, stock).left["DEMO_CLASSES"] == "a table that builds DemoSdpaAttention: bind that class"


def test_refusals(script: ModuleType, overlays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stock = demo(tmp_path, "", "", GATED)
    arguments = ["--stock", str(stock), "--overlays", str(overlays)]
    assert script.main(["nothing", "--directory", DIRECTORY, *arguments]) == 1
    assert "there is no model 'nothing'" in capsys.readouterr().err
    assert script.main(["demo", "--directory", "transformers-3.0", *arguments]) == 1
    assert "there is no such overlay directory" in capsys.readouterr().err
    assert script.main(["demo", "--directory", DIRECTORY, *arguments]) == 0
    shown = capsys.readouterr()
    assert "left to you: DemoExperts" in shown.err and shown.out.endswith("modeling_demo.py\n")
    assert script.main(["demo", "--directory", DIRECTORY, *arguments]) == 1
    assert "this overlay is there already" in capsys.readouterr().err
