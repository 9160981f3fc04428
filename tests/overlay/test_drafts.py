"""scripts/new-overlay drafts working overlays, which run instead of the shipped ones and return stock's results."""

from __future__ import annotations

import ast
import copy
import zipfile
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

# Not a shipped directory, so that no shipped overlay is mistaken for a draft.
DIRECTORY = "transformers-4.0"
DRAFTED = ("cohere", "gemma2", "glm4", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
WHOLE = [case for case in CASES if case.overlay in DRAFTED and case.applies and not case.variant]
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
    # If an earlier test activated a shipped overlay, that overlay would serve the model.
    deactivate()
    yield
    deactivate()


def drafted(script: ModuleType, overlays: Path, model: str) -> Path:
    """Draft a model's overlay from the installed transformers, and record digests as scripts/refresh-digests does."""
    arguments = [model, "--stock", str(installed_package()), "--directory", DIRECTORY, "--overlays", str(overlays)]
    assert script.main(arguments) == 0
    file = overlays / DIRECTORY / "models" / model / f"modeling_{model}.py"
    stock = (installed_package() / "models" / model / f"modeling_{model}.py").read_bytes()
    releases, names = (transformers.__version__,), {}
    for dependency in dependencies(file.read_text()):
        digest = digests(stock, [name := dependency.split(":")[1]])[name]
        assert digest is not None
        names[dependency] = {digest: releases}
    manifest = Manifest(">=4", {model: Record({sha256(stock): releases}, names)})
    (overlays / DIRECTORY / "manifest.toml").write_text(render(manifest))
    return file


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.id)
def test_a_draft_works(case, script: ModuleType, overlays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = drafted(script, overlays, case.overlay)
    drafts = Catalog(overlays)
    monkeypatch.setattr(catalogs, "load", lambda *_, **__: drafts)
    stock = case.build()
    exact, prepared = copy.deepcopy(stock).double(), hf_rocm.prepare(copy.deepcopy(stock), force=True)
    bound = {binding.home["__file__"] for binding in hf_rocm.overlay.bind.bindings()}
    assert bound == {str(file)}, "the shipped overlay ran instead of the draft"

    def run(model):
        first = model(input_ids=tokens(2, 9), use_cache=True)
        second = model(input_ids=tokens(2, 1, seed=1), past_key_values=first.past_key_values, use_cache=True)
        return {"first": first.logits, "second": second.logits}

    with torch.inference_mode():
        with recording() as routes, counted() as hits:
            actual = run(prepared)
        same_dtype = run(stock)
        with in_float64():
            expected = run(exact)
    assert_served(prepared, case.classes(), routes, hits)
    assert_run_as_good_as_eager(actual, same_dtype, expected)


@pytest.mark.skipif(not NEWEST, reason="the shipped overlays were written for the newest release")
@pytest.mark.parametrize("model", ["granite", "llama", "mistral", "qwen2"])
def test_a_draft_equals_the_shipped_overlay(model: str, script: ModuleType, overlays: Path, catalog: Catalog) -> None:
    shipped = catalog.find(model, transformers.__version__)
    assert shipped is not None

    def bound(text: str) -> set[str]:
        nodes = list(ast.walk(ast.parse(text)))
        calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "overlay.binds"]
        return {ast.unparse(node) for node in (*calls, *(item for item in nodes if isinstance(item, ast.FunctionDef)))}

    draft_binds = bound(drafted(script, overlays, model).read_text())
    assert draft_binds == bound(shipped.text)
    assert len(draft_binds) >= 3


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


def test_an_unknown_forward_is_not_drafted_and_the_new_line_is_named(script: ModuleType, tmp_path: Path) -> None:
    result = draft(
        script, demo(tmp_path, "query = query * torch.sigmoid(self.gate(hidden_states))", "", "self.up_proj(x)")
    )
    assert result.served == ("DemoRMSNorm",)
    assert result.left["DemoAttention"] == "query = query * torch.sigmoid(self.gate(hidden_states))"
    assert result.left["DemoMLP"] == "return self.down_proj(self.up_proj(x))"
    assert "DemoExperts" in result.left
    assert dependencies(result.text) == ["transformers.models.demo.modeling_demo:DemoRMSNorm"]


def test_an_unknown_argument_of_the_attention_interface_is_never_dropped(script: ModuleType, tmp_path: Path) -> None:
    result = draft(script, demo(tmp_path, "", ", scaling=self.scaling, new_term=self.bias", GATED))
    assert "new_term" in result.left["DemoAttention"] and result.served == ("DemoRMSNorm", "DemoMLP")


def test_known_arguments_are_passed_on(script: ModuleType, tmp_path: Path) -> None:
    result = draft(script, demo(tmp_path, "", ", scaling=self.s, softcap=self.cap, s_aux=self.sinks", GATED))
    assert result.left.keys() == {"DemoExperts"}
    assert "scale=self.s, softcap=softcap, sinks=sinks, **seen" in result.text
    assert "beyond_sdpa=True" in result.text and "overlay.binds(DemoMLP, layers.GatedMLP())" in result.text


def test_a_factor_of_the_queries_becomes_the_scale(script: ModuleType, tmp_path: Path) -> None:
    result = draft(script, demo(tmp_path, "query = query * self.scaling", ", scaling=1.0", GATED))
    assert "ops.attention(query, key, value, scale=self.scaling, **seen)" in result.text
    for number, (line, terms) in enumerate(
        (
            # The query would be scaled twice.
            ("query = query * self.scaling", ", scaling=self.scaling"),
            ("key = key * self.scaling", ", scaling=1.0"),
            ("query = self.q_norm(query * self.scaling)", ", scaling=1.0"),
            ("query = query + self.scaling", ", scaling=1.0"),
        )
    ):
        assert "DemoAttention" in draft(script, demo(tmp_path / str(number), line, terms, GATED)).left


def test_a_norm_after_the_rotary_embedding_is_not_drafted_before_it(script: ModuleType, tmp_path: Path) -> None:
    """The norm and the rotary embedding don't commute if the norm has a weight or the rotary embedding also scales."""
    rotate = "cos, sin = position_embeddings; query, key = apply_rotary_pos_emb(query, key, cos, sin)"
    norm = "query = self.q_norm(query); key = self.k_norm(key)"
    before = draft(script, demo(tmp_path / "before", f"{norm}; {rotate}", ", scaling=1.0", GATED))
    assert 'norms=("q_norm", "k_norm")' in before.text and "DemoAttention" in before.served
    after = draft(script, demo(tmp_path / "after", f"{rotate}; {norm}", ", scaling=1.0", GATED))
    assert after.left["DemoAttention"] == "query = self.q_norm(query)"


def test_experts_of_transformers_interface_are_declared(script: ModuleType, tmp_path: Path) -> None:
    stock = demo(tmp_path, "", "", "self.act_fn(self.up_proj(x))")
    file = stock / "models/demo/modeling_demo.py"
    plain = file.read_text()
    assert draft(script, stock).left["DemoMLP"] == "it has no gate and stays stock"
    file.write_text(plain.replace("class DemoExperts", "@use_experts_implementation\nclass DemoExperts"))
    assert "overlay.binds(DemoExperts, layers.StackedExperts())" in draft(script, stock).text
    file.write_text(plain.replace("class DemoExperts", "@use_experts_implementation(has_bias=True)\nclass DemoExperts"))
    assert "has_bias=True" in draft(script, stock).left["DemoExperts"]


def test_a_block_whose_experts_are_served_needs_no_work(script: ModuleType, tmp_path: Path) -> None:
    stock = demo(tmp_path, "", "", GATED)
    file = stock / "models/demo/modeling_demo.py"
    block = (
        "\nclass DemoSparseMoeBlock(nn.Module):\n    def __init__(self, config):\n"
        "        self.experts = DemoExperts(config)\n\n    def forward(self, x):\n        return self.experts(x)\n"
    )
    file.write_text(file.read_text() + block)
    assert draft(script, stock).left["DemoSparseMoeBlock"] == "not drafted: write it, or leave it stock"
    served = "@use_experts_implementation\nclass DemoExperts"
    file.write_text(file.read_text().replace("class DemoExperts", served))
    assert draft(script, stock).left["DemoSparseMoeBlock"] == "it needs no work: it calls DemoExperts, which is served"


@pytest.mark.skipif(not NEWEST, reason="only the newest release has this form")
def test_a_mask_after_the_cache_is_a_parameter_of_the_draft(script: ModuleType) -> None:
    text = script.from_stock("opt", DIRECTORY, installed_package()).text
    head = next(
        line for line in text.splitlines() if "def optattention" in line or "self, stock, hidden_states" in line
    )
    assert "past_key_values=None, attention_mask=None" in head and "scale=self.scaling" in text


def test_a_table_of_classes_is_reported(script: ModuleType, tmp_path: Path) -> None:
    stock = demo(tmp_path, "", "", GATED)
    file = stock / "models/demo/modeling_demo.py"
    file.write_text(file.read_text() + 'DEMO_CLASSES = {"eager": DemoAttention, "sdpa": DemoSdpaAttention}\n')
    assert draft(script, stock).left["DEMO_CLASSES"] == "a table that selects DemoSdpaAttention: bind that class"


def test_a_release_is_read_from_the_cached_wheel(
    script: ModuleType, overlays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = demo(tmp_path, "", "", GATED)
    monkeypatch.setattr(script, "WHEELS", tmp_path)
    with zipfile.ZipFile(tmp_path / "transformers-5.2.0-py3-none-any.whl", "w") as archive:
        archive.write(stock / "models/demo/modeling_demo.py", "transformers/models/demo/modeling_demo.py")
    assert script.main(["demo", "--directory", DIRECTORY, "--overlays", str(overlays), "--release", "5.2.0"]) == 0
    assert (overlays / DIRECTORY / "models/demo/modeling_demo.py").is_file()


def test_releases_and_directory_follow_from_the_wheels(
    script: ModuleType,
    overlays: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (overlays / "transformers-5.2").mkdir()
    (overlays / "transformers-5.2/manifest.toml").write_text('transformers = ">=5.2"\n')
    wheels = {release: tmp_path / f"{release}.whl" for release in ("4.9.0", "5.0.0", "5.1.0", "5.2.0")}
    for release, wheel in wheels.items():
        text = STOCK.format("", "", GATED if release == "5.2.0" else "self.up_proj(x)")
        with zipfile.ZipFile(wheel, "w") as archive:
            if release != "4.9.0":
                archive.writestr("transformers/models/demo/modeling_demo.py", text)
    monkeypatch.setattr(script, "download", lambda *_: wheels)
    assert script.main(["demo", "--overlays", str(overlays)]) == 0
    shown = capsys.readouterr()
    assert f"demo is in transformers 5.0.0–5.2.0; overlay directory: {DIRECTORY}\n" in shown.err
    assert "the draft would differ for 5.0.0–5.1.0 (would serve DemoAttention, DemoRMSNorm)\n" in shown.err
    assert "layers.GatedMLP()" in (overlays / DIRECTORY / "models/demo/modeling_demo.py").read_text()
    assert script.main(["demo", "--overlays", str(overlays), "--release", "4.9.0"]) == 1
    assert "transformers 4.9.0 has no model 'demo'" in capsys.readouterr().err
    assert script.main(["nothing", "--overlays", str(overlays)]) == 1
    assert "no release has a model 'nothing'" in capsys.readouterr().err
    assert script.main(["demmo", "--overlays", str(overlays)]) == 1
    assert "hint: did you mean demo?" in capsys.readouterr().err


def test_an_attention_class_with_the_forward_of_bart_is_drafted_like_bart(script: ModuleType, catalog: Catalog) -> None:
    draft = script.from_stock("pegasus", "transformers-4.53", installed_package())
    shipped = catalog.find("pegasus", transformers.__version__)
    assert shipped is not None and draft.text == shipped.text
    assert (
        "PegasusAttention"
        in script.draft(
            (installed_package() / "models/pegasus/modeling_pegasus.py").read_text(), module="a", first="5"
        ).left
    )


def test_invalid_arguments_are_refused(
    script: ModuleType, overlays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert "this overlay already exists" in capsys.readouterr().err
