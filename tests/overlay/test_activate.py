"""Overlays that are activated in memory are checked first, bound to the stock classes, and unbound."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from hf_rocm.errors import DigestMismatch, OptionError, OverlayError
from hf_rocm.overlay import bind
from hf_rocm.overlay.activate import activate, deactivate, is_active
from hf_rocm.overlay.catalog import Catalog
from hf_rocm.overlay.check import check
from hf_rocm.overlay.commands import install
from hf_rocm.overlay.locate import locate
from hf_rocm.overlay.scan import survey
from tests.overlay.conftest import Site


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("HF_ROCM_FORCE", raising=False)
    deactivate()
    yield
    deactivate()


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ROCM_FORCE", "1")


@pytest.fixture
def copied_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Make activation read the files of a copy instead of the installed ones."""
    monkeypatch.setattr("hf_rocm.overlay.activate.locate", lambda: site.installation)
    return site


def llama_bindings() -> dict[str, bind.Binding]:
    return {binding.cls.__name__: binding for binding in bind.bindings() if binding.model == "llama"}


def test_without_rocm_and_without_force_nothing_is_bound() -> None:
    assert activate("llama") == []
    assert list(bind.bindings()) == []


def test_with_force_the_stock_classes_are_bound_everywhere(forced: None) -> None:
    from transformers.models.llama import modeling_llama

    stock = modeling_llama.LlamaMLP.forward
    assert activate("llama") == ["llama"]
    assert modeling_llama.LlamaMLP.forward is not stock
    assert {"LlamaAttention", "LlamaMLP", "LlamaRMSNorm"} <= set(llama_bindings())
    assert {binding.mode for binding in llama_bindings().values()} == {bind.ON}
    assert deactivate("llama") == ["llama"]
    assert modeling_llama.LlamaMLP.forward is stock
    assert deactivate("llama") == []


def test_the_loader_binds_without_turning_any_class_on() -> None:
    assert activate("llama", everywhere=False) == ["llama"]
    assert {binding.mode for binding in llama_bindings().values()} == {bind.OFF}


def test_activate_is_idempotent(forced: None) -> None:
    activate("llama")
    first = {name: binding.replacement for name, binding in llama_bindings().items()}
    activate("llama", everywhere=False)
    assert activate("llama") == ["llama"]
    assert {name: binding.replacement for name, binding in llama_bindings().items()} == first
    deactivate()
    activate("llama")
    assert set(llama_bindings()) == set(first)


def test_without_a_name_every_overlay_of_the_release_is_bound(forced: None, catalog: Catalog) -> None:
    assert activate() == [state.model for state in survey(locate(), catalog)]
    assert {"bert", "gemma", "llama", "qwen3"} <= {binding.model for binding in bind.bindings()}


def test_only_the_named_model_is_bound(forced: None) -> None:
    activate("llama")
    assert {binding.model for binding in bind.bindings()} == {"llama"}


def test_tracebacks_show_the_lines_of_the_overlay(forced: None) -> None:
    activate("llama")
    (name,) = (name for name in sys.modules if name.startswith("hf_rocm._active.") and name.endswith(".llama"))
    module = sys.modules[name]
    assert module.__file__ is not None and module.__file__.endswith("models/llama/modeling_llama.py")
    assert module.__dict__["__hf_rocm_activation__"].endswith("/llama")


def test_a_digest_mismatch_is_refused_and_nothing_is_bound(forced: None, copied_site: Site) -> None:
    file = copied_site.model("llama")
    file.write_text(
        file.read_text().replace("class LlamaMLP(nn.Module):", "class LlamaMLP(nn.Module):\n    changed = 1\n")
    )
    with pytest.raises(DigestMismatch) as refused:
        activate("gemma", "llama")
    assert refused.value.facts["file"] == str(file)
    assert "LlamaMLP" in refused.value.facts["expected"]
    assert refused.value.facts["found"].startswith("digest ")
    assert refused.value.hint
    assert list(bind.bindings()) == [], "an overlay was bound"


def test_a_mismatch_of_another_model_does_not_matter(forced: None, copied_site: Site) -> None:
    copied_site.model("bert").write_bytes(b"")
    assert activate("llama") == ["llama"]


def test_only_the_stock_part_of_an_installed_file_is_checked(forced: None, copied_site: Site) -> None:
    install(["llama"], transformers_path=copied_site.path)
    assert activate("llama") == ["llama"]
    copied_site.model("llama").write_bytes(copied_site.model("llama").read_bytes() + b"x = 1\n")
    with pytest.raises(OverlayError, match="has been edited"):
        activate("llama")


def test_an_unknown_release_and_an_unknown_model_are_refused(forced: None, copied_site: Site) -> None:
    with pytest.raises(OverlayError, match="no overlay for 'mistrall'"):
        activate("mistrall")
    copied_site.set_release("6.1.0")
    with pytest.raises(OverlayError, match=r"transformers 6\.1\.0"):
        activate("llama")


def test_an_overlay_that_fails_leaves_nothing_bound(
    forced: None, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    from hf_rocm.overlay import activate as module

    def broken(overlay):
        path = tmp_path / "broken.py"
        path.write_text(overlay.text + "\nraise RuntimeError('broken')\n")
        return type(overlay)(overlay.model, overlay.directory, path, overlay.requires, overlay.record)

    usable = module._usable
    monkeypatch.setattr(module, "_usable", lambda state: broken(usable(state)))
    with pytest.raises(RuntimeError, match="broken"):
        activate("llama")
    assert list(bind.bindings()) == []
    monkeypatch.undo()
    monkeypatch.setenv("HF_ROCM_FORCE", "1")
    assert activate("llama") == ["llama"]


def test_a_wrapped_binding_is_recognised_by_its_source(forced: None) -> None:
    """A profiler or a counter replaces the bound function with a wrapper that has different globals."""
    activate("llama")
    binding = llama_bindings()["LlamaMLP"]
    space: dict[str, object] = {"inner": binding.replacement, "calls": []}
    exec("def counted(*args, **kwargs):\n    calls.append(1)\n    return inner(*args, **kwargs)", space)
    binding.replacement = space["counted"]
    assert is_active("llama")
    home = binding.home
    activate("llama")
    assert llama_bindings()["LlamaMLP"] is binding and binding.home is home
    assert binding.replacement is space["counted"], "the overlay was executed again"


def test_a_function_wrapped_before_binding_belongs_to_its_source(forced: None) -> None:
    from transformers.models.llama import modeling_llama

    other_namespace: dict[str, object] = {"__name__": "somewhere.else"}
    exec("def wrap(function):\n    return lambda self, stock, *args, **kwargs: function(self, stock)", other_namespace)
    namespace = {"__name__": "hf_rocm._active.test", "wrap": other_namespace["wrap"], "replaces": bind.replaces}
    namespace |= {"__hf_rocm_activation__": "test/llama", "cls": modeling_llama.LlamaMLP}
    exec("@replaces(cls)\n@wrap\ndef mlp(self, stock):\n    return None", namespace)
    assert llama_bindings()["LlamaMLP"].home is namespace
    assert is_active("llama")


@pytest.mark.parametrize("force", ["0", "1"])
def test_names_without_an_overlay_are_refused_on_every_machine(monkeypatch: pytest.MonkeyPatch, force: str) -> None:
    monkeypatch.setenv("HF_ROCM_FORCE", force)
    for function in (activate, deactivate):
        with pytest.raises(OverlayError, match="hf-rocm has no overlay for 'lama'"):
            function("llama", "lama")
    assert not llama_bindings()


def test_deactivating_a_known_model_that_is_not_bound_returns_nothing() -> None:
    assert deactivate("llama") == []


@pytest.mark.parametrize("function", [activate, deactivate, check])
@pytest.mark.parametrize("name", [None, 3, ["llama"]])
def test_a_name_that_is_not_a_string_is_refused(function: Callable[..., object], name: object) -> None:
    with pytest.raises(OptionError, match="takes names of model folders") as caught:
        function(name)
    assert caught.value.facts["found"] == type(name).__name__
