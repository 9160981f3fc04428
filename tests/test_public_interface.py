"""The public interface equals `public_interface.json`. docs/testing.md explains how to record it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_rocm import check_version
from hf_rocm.cli import main
from hf_rocm.overlay import facts
from hf_rocm.tools.tuning import shapes
from tests import public_interface
from tests.overlay.conftest import Site, site
from tests.parity import models
from tests.tools.recorded import Recorded
from tests.tools.tuning.conftest import fake_aiter, own_cache, row, table_text, write

__all__ = ["fake_aiter", "own_cache", "site"]

TINY = ("--config", "small", "--layers", "1", "--device", "cpu", "--rounds", "1", "--prompt", "8", "--new", "4")
STATIC: dict[str, Callable[[], dict[str, Any]]] = {
    "names of hf_rocm": lambda: public_interface.names("hf_rocm"),
    "names of hf_rocm.ops": lambda: public_interface.names("hf_rocm.ops"),
    "names of hf_rocm.errors": lambda: public_interface.names("hf_rocm.errors"),
    "commands": public_interface.commands,
    "environment variables": public_interface.variables,
    "promises": public_interface.promises,
    "codes": public_interface.codes,
}
Run = Callable[..., Any]


@pytest.fixture
def recording(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--record-interface"))


@pytest.mark.parametrize("section", STATIC)
def test_the_interface_equals_the_record(section: str, recording: bool) -> None:
    current = json.loads(json.dumps(STATIC[section]()))
    assert current
    if recording:
        public_interface.save(section, current)
    differences = public_interface.differences(public_interface.load()[section], current)
    assert not differences, "\n".join(differences)


def test_removed_changed_and_new_names_are_differences() -> None:
    recorded = {"same": 1, "gone": 1, "changed": "(x: int)"}
    differences = public_interface.differences(recorded, {"same": 1, "changed": "(x: str)", "new": 2})
    assert [line.partition(":")[0] for line in differences] == ["changed", "gone", "not recorded"]


def test_the_schema_of_an_output_has_all_types_of_items_and_one_path_for_data_keys() -> None:
    value = {"files": [{"a": None}, {"a": "x", "b": 1.5}], "facts": {"one": 1, "two": True}}
    assert public_interface.shape(value) == {
        "": {"object"},
        ".files": {"array"},
        ".files[]": {"object"},
        ".files[].a": {"null", "string"},
        ".files[].b": {"number"},
        ".facts": {"object"},
        ".facts.{}": {"number", "boolean"},
    }


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns a function that runs a command with `--json`, and returns the exit code and the parsed output."""

    def run(*arguments: object, main: Callable[[list[str]], int] = main) -> tuple[int, Any]:
        capsys.readouterr()
        code = main([*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def compare(recording: bool) -> Callable[..., None]:
    """Returns a function that compares a command's outputs `(exit code, data)` with the recorded keys and types."""

    def compare(command: str, *outputs: tuple[int, Any]) -> None:
        shapes: dict[str, set[str]] = {"exit code": {str(code) for code, _ in outputs}}
        for _, data in outputs:
            for path, types in public_interface.shape(data).items():
                shapes.setdefault(path, set()).update(types)
        current = {path: sorted(types) for path, types in shapes.items()}
        section = f"output of {command} --json"
        if recording:
            public_interface.save(section, current)
        differences = public_interface.differences(public_interface.load()[section], current)
        assert not differences, "\n".join(differences)

    return compare


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_checkpoint("llama", tmp_path_factory.mktemp("llama"), torch.bfloat16)


def test_installing_overlays(site: Site, run: Run, compare: Callable[..., None]) -> None:
    path_option = ("--transformers-path", site.path)
    changed = site.model("bert")
    before = changed.read_bytes()
    changed.write_bytes(before + b" ")
    refused, unknown = run("install-overlays", *path_option), run("install-overlays", "mistrall", *path_option)
    changed.write_bytes(before)
    planned, done = run("install-overlays", "--dry-run", *path_option), run("install-overlays", *path_option)
    compare("install-overlays", refused, unknown, planned, done)
    shown, different = run("status", *path_option), run("status", "--diff", "llama", *path_option)
    changed.write_bytes(changed.read_bytes() + b" ")
    compare("status", shown, different, run("status", *path_option))
    compare("status --record", run("status", "--record", *path_option))
    refused = run("uninstall-overlays", *path_option)
    compare("uninstall-overlays", refused, run("uninstall-overlays", "llama", *path_option))


def test_check_version(site: Site, run: Run, compare: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*arguments: str) -> Any:
        return run("--transformers-path", site.path, *arguments, main=check_version.main)

    machine = {
        "torch_facts": [facts.TorchFacts(), facts.TorchFacts("/torch", "2.9", "6.4", "12.8")],
        "rocm_facts": [facts.RocmFacts(None, False), facts.RocmFacts("6.4.1", True)],
        "aiter_facts": [facts.AiterFacts(), facts.AiterFacts("/aiter", True, "0.1.20")],
    }
    outputs = []
    for number in range(2):
        for name, values in machine.items():
            monkeypatch.setattr(check_version, name, lambda value=values[number]: value)
        outputs += [check(), check("mistrall")]
    site.set_release("6.1.0")
    compare("check_version", *outputs, check())


@pytest.mark.parametrize("machine", ["mi300x", "no-gpu"])
def test_doctor(machine: str, run: Run, compare: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_rocm.tools.doctor.examine.ThisMachine", lambda: Recorded(machine))
    compare(f"doctor on {machine}", run("doctor"))


def test_env(run: Run, compare: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_rocm.tools.doctor.machine.ThisMachine", lambda: Recorded("mi300x"))
    compare("env", run("env"))


def test_port_check(tmp_path: Path, run: Run, compare: Callable[..., None]) -> None:
    (tmp_path / "fine.py").write_text("import json\n")
    clean = run("port-check", tmp_path)
    (tmp_path / "wrong.py").write_text("import pynvml\n")
    (tmp_path / "unreadable.py").write_text("def f(:\n")
    (tmp_path / "notes.md").write_text("no rules\n")
    (tmp_path / "node_modules").mkdir()
    compare("port-check", clean, run("port-check", tmp_path), run("port-check", tmp_path / "nowhere"))


def test_explain_and_warmup(checkpoint: Path, run: Run, compare: Callable[..., None]) -> None:
    forced = ("--force", "--device", "cpu")
    for command in ("explain", "warmup"):
        compare(command, run(command, checkpoint, "--device", "cpu"), run(command, checkpoint, *forced))


def test_quantize(tiny_checkpoint: Path, tmp_path: Path, run: Run, compare: Callable[..., None]) -> None:
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    options = ("--kind", "int8", "--force", "--device", "cpu", "--text", text)
    compare("quantize", run("quantize", tiny_checkpoint, *options))


def test_verify(tiny_checkpoint: Path, tmp_path: Path, run: Run, compare: Callable[..., None]) -> None:
    golden = tmp_path / "golden"
    options = ("verify", tiny_checkpoint, "--device", "cpu", "--quick")
    recorded = run(*options, "--save-golden", golden)
    compare("verify --save-golden", recorded)
    compare("verify", run(*options, "--force", "--golden", golden))


def test_bench(run: Run, compare: Callable[..., None]) -> None:
    models = run("bench", *TINY, "--sides", "stock,liger,hf_rocm")
    rows = ("--op", "rms_norm", "--rows", "2", "--config", "small", "--device", "cpu")
    kernels = run("bench", "ops", *rows, "--refused")
    for _, data in (models, kernels):
        assert isinstance(data["commit"], (str, type(None)))
        # This is a string if hf_rocm is imported from a git checkout.
        data["commit"] = None
        # Triton's release, if it is installed.
        data["machine"].pop("triton", None)
    compare("bench", models)
    compare("bench ops", kernels)


def test_tune(
    checkpoint: Path, tmp_path: Path, run: Run, compare: Callable[..., None], fake_aiter: Any, monkeypatch: Any
) -> None:
    from hf_rocm.ops.aiter.tables.columns import layout_of

    layout = layout_of("0.1.20")
    compare("tune", run("tune", checkpoint, "--prompt", "5", "--release", "0.1.20"))
    fake_aiter("0.1.20", row(layout))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    gemms = [shapes.Gemm(m, 4096, 512, "torch.bfloat16", False) for m in (1, 8)]
    result = run("tune", "--shapes", write(tmp_path / "shapes.csv", shapes.write(gemms)))
    compare("tune with aiter", result)
    good = write(tmp_path / "good.csv", table_text(layout, row(layout)))
    bad = write(tmp_path / "bad.csv", table_text(layout, row(layout), row(layout, N="x")))
    compare("tune check", run("tune", "check", good, bad, tmp_path))
    compare("tune merge", run("tune", "merge", good))
    compare("tune list", run("tune", "list"))


def test_exit_codes(site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit codes are 0 (done), 1 (refused), 2 (usage), 3 (a bug), and 128 + n (signal n)."""
    from hf_rocm.overlay.install import Interrupted

    path_option = ["--transformers-path", str(site.path)]
    assert main(["status", *path_option]) == 0
    assert main(["status", "mistrall", *path_option]) == 1
    assert main(["status", "--nonsense"]) == 2

    def fails_with(error: BaseException) -> Callable[..., None]:
        def broken(*arguments: object, **options: object) -> None:
            raise error

        return broken

    monkeypatch.setattr("hf_rocm.overlay.commands.survey", fails_with(ZeroDivisionError()))
    assert main(["status", *path_option]) == 3
    monkeypatch.setattr("hf_rocm.overlay.commands.survey", fails_with(Interrupted(15)))
    assert main(["status", *path_option]) == 128 + 15
