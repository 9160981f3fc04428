"""The maintainers' scripts: digests from released wheels, and drafts of new overlays."""

from __future__ import annotations

import ast
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from hf_rocm.overlay import manifest
from hf_rocm.overlay.catalog import Catalog

ROOT = Path(__file__).resolve().parents[2]

STOCK = """
class DemoAttention:
    def forward(self, hidden_states, mask=None, *, deep=False, **kwargs):
        return {0}

class DemoMLP:
    def forward(self, x):
        return x

class DemoLayer:
    def forward(self, x):
        return x
"""

OVERLAY = """
if True:
    from transformers.activations import ACT2FN
    from transformers.models.demo.modeling_demo import DemoAttention
"""


def load(name: str) -> ModuleType:
    loader = SourceFileLoader(name.replace("-", "_"), str(ROOT / "scripts" / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def refresh() -> ModuleType:
    return load("refresh-digests")


def wheel(folder: Path, release: str, result: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"transformers-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("transformers/models/demo/modeling_demo.py", STOCK.format(result))
        archive.writestr("transformers/activations/__init__.py", "ACT2FN = {}\n")
    return path


def directory(root: Path, name: str, requires: str) -> None:
    models = root / name / "models" / "demo"
    models.mkdir(parents=True)
    (models / "modeling_demo.py").write_text(OVERLAY)
    (root / name / "manifest.toml").write_text(f'transformers = "{requires}"\n')


@pytest.fixture
def overlays(tmp_path: Path) -> Path:
    directory(tmp_path / "overlays", "transformers-5.0", ">=5.0,<6")
    directory(tmp_path / "overlays", "transformers-5.2", ">=5.2,<6")
    for release, result in {"5.0.0": "1", "5.1.0": "2", "5.2.0": "2", "5.10.0": "3", "5.11.0rc1": "4"}.items():
        wheel(tmp_path / "wheels", release, result)
    return tmp_path / "overlays"


def run(refresh: ModuleType, overlays: Path, *arguments: str) -> int:
    result: int = refresh.main(["--overlays", str(overlays), "--wheels", str(overlays.parent / "wheels"), *arguments])
    return result


def test_each_directory_records_the_releases_that_it_serves(refresh: ModuleType, overlays: Path) -> None:
    assert run(refresh, overlays) == 0
    old, new = Catalog(overlays).directories
    attention = "transformers.models.demo.modeling_demo:DemoAttention"
    assert list(old.manifest.records["demo"].names[attention].values()) == [("5.0.0",), ("5.1.0",)]
    assert list(new.manifest.records["demo"].names[attention].values()) == [("5.2.0",), ("5.10.0",)]
    assert list(new.manifest.records["demo"].files.values()) == [("5.2.0",), ("5.10.0",)]
    assert list(new.manifest.records["demo"].names["transformers.activations:ACT2FN"].values()) == [("5.2.0", "5.10.0")]


def test_check_writes_nothing_and_fails_on_a_difference(
    refresh: ModuleType, overlays: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (overlays / "transformers-5.0/manifest.toml").read_text()
    assert run(refresh, overlays, "--check") == 1
    assert (overlays / "transformers-5.0/manifest.toml").read_text() == text
    assert "DemoAttention has a new digest" in capsys.readouterr().out
    run(refresh, overlays)
    capsys.readouterr()
    assert run(refresh, overlays, "--check") == 0
    assert capsys.readouterr().out == ""


def test_a_second_run_gives_the_same_bytes(refresh: ModuleType, overlays: Path) -> None:
    run(refresh, overlays)
    first = (overlays / "transformers-5.2/manifest.toml").read_bytes()
    run(refresh, overlays)
    assert (overlays / "transformers-5.2/manifest.toml").read_bytes() == first


def test_a_release_that_lacks_a_name_is_refused(
    refresh: ModuleType, overlays: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = wheel(overlays.parent / "wheels", "5.12.0", "1")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("transformers/models/demo/modeling_demo.py", "class Other: pass\n")
        archive.writestr("transformers/activations.py", "ACT2FN = {}\n")
    assert run(refresh, overlays) == 1
    error = capsys.readouterr().err
    assert "transformers 5.12.0 has no DemoAttention" in error
    assert "hint: end the directory's range before that release" in error


def test_a_draft_names_the_classes_and_calls_stock(overlays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = load("new-overlay")
    (overlays / "transformers-5.2/models/demo/modeling_demo.py").unlink()
    (overlays / "transformers-5.2/models/demo").rmdir()
    arguments = ["demo", "--directory", "transformers-5.2", "--overlays", str(overlays)]
    arguments += ["--wheel", str(overlays.parent / "wheels/transformers-5.10.0-py3-none-any.whl")]
    assert draft.main(arguments) == 0
    text = (overlays / "transformers-5.2/models/demo/modeling_demo.py").read_text()
    ast.parse(text)
    assert manifest.dependencies(text) == [
        "transformers.models.demo.modeling_demo:DemoAttention",
        "transformers.models.demo.modeling_demo:DemoMLP",
    ]
    assert "def demo_attention(self, stock, hidden_states, mask=None, **kwargs):" in text
    assert "return stock(self, hidden_states, mask, **kwargs)" in text
    assert "def demo_mlp(self, stock, x):" in text
    assert draft.main(arguments) == 1, "an overlay that is there is not overwritten"
    assert "this overlay is there already" in capsys.readouterr().err
