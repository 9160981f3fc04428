"""The maintainers' script that computes digests from released wheels."""

from __future__ import annotations

import sys
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

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


def test_every_directory_records_the_releases_that_it_serves(refresh: ModuleType, overlays: Path) -> None:
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
    assert "DemoAttention is defined in 5.0.0" in capsys.readouterr().out
    run(refresh, overlays)
    capsys.readouterr()
    assert run(refresh, overlays, "--check") == 0
    assert capsys.readouterr().out == ""


def test_a_new_form_is_shown_as_source_and_as_a_diff(
    refresh: ModuleType, overlays: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(refresh, overlays)
    shown = capsys.readouterr().out.partition("transformers-5.2")[0]
    first, second = shown.split("transformers-5.0/manifest.toml: demo: ")[2:]
    assert first.splitlines()[0].endswith(":DemoAttention is defined in 5.0.0")
    assert "    class DemoAttention:" in first and "            return 1" in first
    assert second.splitlines()[0].endswith(":DemoAttention has a new definition in 5.1.0")
    changed = [line.strip() for line in second.splitlines() if line.lstrip()[:1] in ("+", "-")]
    assert changed == ["-        return 1", "+        return 2"]
    wheel(overlays.parent / "wheels", "5.12.0", "4")
    run(refresh, overlays)
    (form,) = capsys.readouterr().out.split("transformers-5.2/manifest.toml: demo: ")[1:]
    assert "-        return 3" in form and "+        return 4" in form


def test_the_shown_source_omits_what_digests_ignore(refresh: ModuleType) -> None:
    source = 'class A:\n    """Doc."""\n    def f(self, x: int = 1) -> int:\n        return x  # why\n'
    assert refresh.forms.text_of(source, "A") == "class A:\n\n    def f(self, x=1):\n        return x"
    assert refresh.forms.text_of(source, "B|A.f") == "def f(self, x=1):\n    return x"
    assert refresh.forms.text_of("try:\n    from a import b\nexcept ImportError:\n    b = None\n", "b").startswith(
        "try:"
    )
    assert refresh.forms.text_of("c, d = 1, 2\n", "d") == "c, d = (1, 2)"
    assert refresh.forms.text_of(source, "C") == ""


def test_only_named_models_are_recorded(
    refresh: ModuleType, overlays: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(refresh, overlays)
    before = Catalog(overlays).directories[0].manifest.records["demo"]
    other = overlays / "transformers-5.0/models/other"
    other.mkdir()
    (other / "modeling_other.py").write_text(
        "if True:\n    from transformers.models.other.modeling_other import Other\n"
    )
    for path in (overlays.parent / "wheels").iterdir():
        wheel(path.parent, path.name.split("-")[1], "9")
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("transformers/models/other/modeling_other.py", "class Other: pass\n")
    assert run(refresh, overlays, "other") == 0
    after = Catalog(overlays).directories[0].manifest.records
    assert after["demo"] == before and len(after["other"].files) == 1
    assert run(refresh, overlays, "absent") == 1
    assert "there is no overlay of 'absent'" in capsys.readouterr().err


def test_missing_wheels_are_downloaded_with_a_message_and_kept(
    refresh: ModuleType, overlays: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = overlays.parent / "wheels"

    def pip(*arguments: str) -> str:
        if arguments[0] == "index":
            return "Available versions: 5.13.0, 5.12.0, 5.0.0\n"
        wheel(folder, arguments[-1].partition("==")[2], "5")
        return ""

    monkeypatch.setattr(sys.modules["lib.wheels"], "_pip", pip)
    result = refresh.download(Catalog(overlays), folder)
    assert list(result) == ["5.0.0", "5.12.0", "5.13.0"]
    shown = capsys.readouterr().err
    assert f"fetching 2 wheels, about 22 MB, into {folder}" in shown and "\r" not in shown
    refresh.download(Catalog(overlays), folder)
    assert capsys.readouterr().err == ""


def test_releases_after_the_newest_recorded_one_are_only_read_on_request(
    refresh: ModuleType, overlays: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = overlays.parent / "wheels"
    # This records 5.0.0 to 5.10.0.
    run(refresh, overlays)

    def pip(*arguments: str) -> str:
        if arguments[0] == "index":
            return "Available versions: 5.11.0, 5.10.1, 5.10.0, 5.2.0, 5.1.0, 5.0.0\n"
        wheel(folder, arguments[-1].partition("==")[2], "5")
        return ""

    monkeypatch.setattr(sys.modules["lib.wheels"], "_pip", pip)
    overlays_argument = ("--overlays", str(overlays), "--cache", str(folder))
    capsys.readouterr()
    assert refresh.main([*overlays_argument, "demo"]) == 0
    assert "not read: transformers 5.10.1–5.11.0" in capsys.readouterr().err
    assert Catalog(overlays).releases("demo")[-1] == "5.10.0"
    assert not (folder / "transformers-5.11.0-py3-none-any.whl").exists()
    assert refresh.main([*overlays_argument, "--new-releases", "demo"]) == 0
    assert "not read" not in capsys.readouterr().err
    assert Catalog(overlays).releases("demo")[-1] == "5.11.0"


def test_a_second_run_writes_the_same_bytes(refresh: ModuleType, overlays: Path) -> None:
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
    assert "hint: exclude that release in the manifest (a range and a reason under [demo])" in error


def test_releases_without_the_model_are_skipped(refresh: ModuleType, overlays: Path) -> None:
    path = wheel(overlays.parent / "wheels", "5.0.1", "1")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("transformers/models/other/modeling_other.py", "")
    assert run(refresh, overlays) == 0
    assert "5.0.1" not in (overlays / "transformers-5.0/manifest.toml").read_text()


def test_the_range_of_a_model_is_kept_and_used(refresh: ModuleType, overlays: Path) -> None:
    file = overlays / "transformers-5.2/manifest.toml"
    section = '\n[demo]\ntransformers = ">=5.10"\nreason = "it had \\"another\\" form before"\n'
    file.write_text(file.read_text() + section)
    assert run(refresh, overlays) == 0
    old, new = Catalog(overlays).directories
    assert new.manifest.records["demo"].releases() == {"5.10.0"}
    assert old.manifest.records["demo"].releases() == {"5.0.0", "5.1.0", "5.2.0"}, (
        "the older overlay does not serve the rest"
    )
    assert section in file.read_text()
    assert run(refresh, overlays, "--check") == 0


def test_every_wheel_is_opened_once(refresh: ModuleType, overlays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    real = zipfile.ZipFile

    def counting(path: Path) -> zipfile.ZipFile:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(refresh.zipfile, "ZipFile", counting)
    run(refresh, overlays)
    assert len(opened) == len(set(opened)) == 4


def test_the_parts_that_features_depend_on_are_recorded_for_every_release(
    refresh: ModuleType, overlays: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ("transformers.models.demo.modeling_demo:DemoAttention.forward", "transformers.generation.utils:Absent")
    monkeypatch.setattr(refresh.features, "FEATURES", {"deep": parts})
    file = overlays / "features.toml"
    file.write_text('transformers = ">=5"\n')
    assert run(refresh, overlays) == 0
    assert "overlays/features.toml: deep: transformers.generation.utils:Absent is missing" in capsys.readouterr().out
    recorded = refresh.parse(file.read_text(), source=file).records["deep"]
    releases = ("5.0.0", "5.1.0", "5.2.0", "5.10.0")
    assert recorded.names[parts[1]] == {"absent": releases}
    assert list(recorded.names[parts[0]].values()) == [("5.0.0",), ("5.1.0", "5.2.0"), ("5.10.0",)]
    assert list(recorded.files.values()) == [("5.0.0",), ("5.1.0", "5.2.0"), ("5.10.0",)]
    assert run(refresh, overlays, "--check") == 0
