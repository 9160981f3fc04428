"""Overlays bind every rotary embedding that `layers.RotaryEmbedding` covers, in every tested release."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import ModuleType

import pytest
import transformers

from hf_rocm import layers
from hf_rocm.layers.rotary import RotaryEmbedding
from hf_rocm.overlay.catalog import Catalog
from tests.overlay.conftest import installed_package
from tests.overlay.test_scripts import load

# Parts of models that generate audio, which no test runs.
AUDIO = {"Qwen2_5OmniDiTRotaryEmbedding", "Qwen3OmniMoeRotaryEmbedding"}


@pytest.fixture(scope="module")
def shape() -> ModuleType:
    # Loading the script puts scripts/ on the path.
    load("new-overlay")
    from lib import rotary_shape

    return rotary_shape


def forwards(model: str) -> dict[str, ast.FunctionDef]:
    """The forwards of the rotary embeddings in a stock file."""
    text = (installed_package() / "models" / model / f"modeling_{model}.py").read_text(encoding="utf-8")
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {
        cls.name: member
        for cls in classes
        if cls.name.endswith("RotaryEmbedding")
        for member in cls.body
        if isinstance(member, ast.FunctionDef) and member.name == "forward"
    }


def layer(text: str) -> RotaryEmbedding:
    built: RotaryEmbedding = eval(text, {"layers": layers})
    return built


def bound(text: str, stock: set[str]) -> dict[str, RotaryEmbedding]:
    """The rotary embeddings that an overlay binds."""
    pairs = []
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) == "overlay.binds":
            pairs.append((ast.unparse(call.args[0]), call.args[1]))
        elif ast.unparse(call.func) == "overlay.binds_first":
            pairs += [(str(keyword.arg), keyword.value) for keyword in call.keywords if keyword.arg in stock][:1]
    return {name: layer(ast.unparse(node)) for name, node in pairs if "layers.RotaryEmbedding" in ast.unparse(node)}


def test_the_bound_classes_are_the_recognised_ones(shape: ModuleType, catalog: Catalog) -> None:
    count = 0
    for overlay in catalog.for_release(transformers.__version__):
        if not (installed_package() / "models" / overlay.model).is_dir():
            # A later release of the directory's range has the model.
            continue
        expected = {}
        stock = forwards(overlay.model)
        for name, forward in stock.items():
            try:
                expected[name] = layer(f"layers.{shape.rotary_layer(forward)}")
            except shape.Unknown:
                continue
        expected = {name: module for name, module in expected.items() if name not in AUDIO}
        assert bound(overlay.text, set(stock)) == expected, overlay.id
        count += len(expected)
    assert count >= 39


def without_decorator(forward: ast.FunctionDef) -> None:
    forward.decorator_list = [node for node in forward.decorator_list if "dynamic" not in ast.unparse(node)]


def with_statement(forward: ast.FunctionDef) -> None:
    forward.body.insert(0, ast.parse("position_ids = position_ids + 1").body[0])


def with_parameter(forward: ast.FunctionDef) -> None:
    forward.args.args.append(ast.arg("offset"))


def substituted(old: str, new: str) -> Callable[[ast.FunctionDef], None]:
    def change(forward: ast.FunctionDef) -> None:
        text = ast.unparse(ast.Module(forward.body, []))
        assert old in text
        forward.body = ast.parse(text.replace(old, new, 1)).body

    return change


CHANGES = {
    "decorator": without_decorator,
    "statement": with_statement,
    "parameter": with_parameter,
    "function": substituted("emb.cos()", "emb.sin()"),
    "scaling": substituted("* self.attention_scaling", "+ self.attention_scaling"),
    "frequencies": substituted("self.inv_freq", "self.original_inv_freq"),
    "angles": substituted("torch.cat((freqs, freqs), dim=-1)", "torch.cat((freqs, -freqs), dim=-1)"),
    "one cast": substituted("cos.to(dtype=x.dtype)", "cos"),
    "positions": substituted(".float()", ".half()"),
    "order": substituted("(cos.to(dtype=x.dtype), sin.to(dtype=x.dtype))", "(sin, cos)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_other_forward_is_not_recognised(change: str, shape: ModuleType) -> None:
    forward = forwards("llama")["LlamaRotaryEmbedding"]
    assert shape.rotary_layer(forward) == "RotaryEmbedding()"
    CHANGES[change](forward)
    with pytest.raises(shape.Unknown):
        shape.rotary_layer(forward)
