"""Reported states are correct: the code that runs, the output of status, the comparison of ranks, and upgrades."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hf_rocm
from hf_rocm.check_version import main as check_version
from hf_rocm.cli import main
from hf_rocm.errors import HfRocmError, OverlayError
from hf_rocm.overlay import block
from hf_rocm.overlay import catalog as catalogs
from hf_rocm.overlay.audit import Finding
from hf_rocm.overlay.commands import install, record, status, uninstall
from hf_rocm.overlay.disk import Disk
from tests.overlay.conftest import MODELS, Site, next_release

Farm = Callable[[str], Site]

# This script prints the strings in the code that `import` would run for a file, by Python's rules for compiled files.
RUNS = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("transformers.models.bert.modeling_bert", sys.argv[1])
print(json.dumps([name for name in spec.loader.get_code(spec.name).co_consts if isinstance(name, str)]))
"""
MODES = py_compile.PycInvalidationMode
FRESH = [
    pytest.param([], id="plain"),
    pytest.param(["--check-hash-based-pycs", "never"], id="never checked"),
    pytest.param(["-O"], id="-O", marks=pytest.mark.slow),
    pytest.param(["-OO"], id="-OO", marks=pytest.mark.slow),
]


def executed_version(file: Path, *options: str, prefix: Path | None = None) -> str:
    """The version of the block that a new interpreter would run. Empty if there is no block."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if prefix is not None:
        variables["PYTHONPYCACHEPREFIX"] = str(prefix)
    result = subprocess.run(
        [sys.executable, "-I", *options, "-c", RUNS, str(file)] if prefix is None
        else [sys.executable, *options, "-c", RUNS, str(file)],
        env=variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    constants = json.loads(result.stdout)
    return next((constant for constant in constants if constant in ("0.0.1", "0.0.2", hf_rocm.__version__)), "")


# Blocks with a correct hash: name → (id, version, code, the states that `installed` and --record report)
FORGED = {
    "other code": ("{id}", hf_rocm.__version__, "x = 1\n", "foreign", Finding.CHANGED),
    "no overlay's id": ("transformers-1.0/bert", hf_rocm.__version__, "x = 1\n", "foreign", Finding.CHANGED),
    "another model's": ("{llama}", hf_rocm.__version__, "{text}", "foreign", Finding.CHANGED),
    "another release": ("{id}", "0.0.7", "{text}", "old", Finding.OLD),
    "another release, other code": ("{id}", "0.0.7", "x = 1\n", "old", Finding.OLD),
}


@pytest.mark.parametrize("name", FORGED)
def test_08_a_block_with_other_code_is_reported(farm: Farm, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    site = farm("one")
    file = site.model("bert")
    stock = file.read_bytes()
    catalog = catalogs.load()
    overlay, other = (catalog.find(model, site.installation.version) for model in ("bert", "llama"))
    assert overlay is not None and other is not None
    identity, version, text, expected, finding = FORGED[name]
    identity = identity.format(id=overlay.id, llama=other.id)
    file.write_bytes(block.render(stock, overlay=identity, version=version, text=text.format(text=overlay.text)))
    path_option = ["--transformers-path", str(site.path)]
    (state,) = status(["bert"], transformers_path=site.path).states
    assert (state.installed.value, state.good) == (expected, False)
    (entry,) = [path for path in record(transformers_path=site.path).foreign if path.path == file]
    assert entry.finding is finding
    assert (
        main(["status", "bert", *path_option])
        == main(["status", "--record", *path_option])
        == check_version(["bert", *path_option])
        == 1
    )
    assert "hf-rocm install-overlays" in capsys.readouterr().err
    install(["bert"], transformers_path=site.path)
    assert status(["bert"], transformers_path=site.path).states[0].good
    assert [path.path for path in record(transformers_path=site.path).foreign if path.path == file] == []
    file.write_bytes(block.render(stock, overlay=identity, version=version, text=text.format(text=overlay.text)))
    uninstall(["bert"], transformers_path=site.path)
    assert file.read_bytes() == stock


@pytest.mark.parametrize("mode", list(MODES), ids=lambda mode: mode.name)
@pytest.mark.parametrize("options", FRESH)
def test_12_the_new_code_runs_and_after_uninstall_the_old(
    farm: Farm, mode: py_compile.PycInvalidationMode, options: list[str]
) -> None:
    site = farm("one")
    file = site.model("bert")
    for command, expected in ((install, hf_rocm.__version__), (uninstall, "")):
        for level in ("", "1", "2"):
            cached = importlib.util.cache_from_source(str(file), optimization=level)
            py_compile.compile(str(file), cached, doraise=True, invalidation_mode=mode, optimize=int(level or 0))
        assert executed_version(file, *options) != expected
        command(["bert"], transformers_path=site.path)
        assert executed_version(file, *options) == expected


@pytest.mark.parametrize("same_prefix", [True, False], ids=["the installer's prefix", "another process's prefix"])
def test_12_the_new_code_runs_with_a_cache_prefix(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_prefix: bool
) -> None:
    site, prefix = farm("one"), tmp_path / "prefix"
    file = site.model("bert")
    for command, expected in ((install, hf_rocm.__version__), (uninstall, "")):
        assert executed_version(file, prefix=prefix) != expected
        assert list(prefix.rglob("modeling_bert*.pyc")), "no compiled file is in the prefix"
        with monkeypatch.context() as patch:
            patch.setattr(sys, "pycache_prefix", str(prefix) if same_prefix else None)
            command(["bert"], transformers_path=site.path)
        assert bool(list(prefix.rglob("modeling_bert*.pyc"))) is not same_prefix
        assert executed_version(file, prefix=prefix) == expected


def test_12_a_new_block_of_the_same_size_in_the_same_second_runs(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, prefix = farm("one"), tmp_path / "prefix"
    file = site.model("bert")
    monkeypatch.setattr("hf_rocm.overlay.state.__version__", "0.0.1")
    install(["bert"], transformers_path=site.path)
    size = file.stat().st_size
    monkeypatch.setattr("hf_rocm.overlay.state.__version__", "0.0.2")
    second = int(time.time())
    os.utime(file, (second, second))
    assert executed_version(file, prefix=prefix) == "0.0.1"
    monkeypatch.setattr("hf_rocm.overlay.disk.Disk.write", _within(second))
    install(["bert"], transformers_path=site.path)
    monkeypatch.undo()
    assert file.stat().st_size == size
    assert int(file.stat().st_mtime) != second
    assert executed_version(file, prefix=prefix) == "0.0.2"


def _within(second: int) -> Callable[[Disk, int, bytes], int]:
    """Return a replacement for `Disk.write` that also sets the file's modification time to this second."""

    def write(self: Disk, descriptor: int, data: bytes) -> int:
        count = os.write(descriptor, data)
        os.utime(descriptor, (second, second))
        return count

    return write


def test_12_a_compiled_file_without_its_source_is_removed(farm: Farm) -> None:
    site = farm("one")
    legacy = site.model("bert").with_suffix(".pyc")
    py_compile.compile(str(site.model("bert")), str(legacy), doraise=True)
    install(["bert"], transformers_path=site.path)
    assert not legacy.exists()


def test_08_status_reports_every_state(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    site = farm("one")
    with monkeypatch.context() as older:
        older.setattr("hf_rocm.overlay.state.__version__", "0.0.1")
        install(["bert"], transformers_path=site.path)
    install(["gemma", "llama"], transformers_path=site.path)
    file = site.model("llama")
    file.write_text(file.read_text().replace("# <<< hf-rocm", "mine = 1\n# <<< hf-rocm"))
    result = {state.model: state.installed.value for state in status(transformers_path=site.path)[1]}
    assert result == {"bert": "old", "gemma": "yes", "llama": "edited", "qwen3": "no"}


class Ranks(types.ModuleType):
    """A stand-in for torch.distributed with the functions that `check` uses, and with fixed results of other ranks."""

    def __init__(self, *others: tuple[str, str, HfRocmError | None]) -> None:
        super().__init__("torch.distributed")
        self.others, self.sent = others, []

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_world_size(self) -> int:
        return len(self.others) + 1

    def all_gather_object(self, objects: list[Any], local: Any) -> None:
        self.sent.append(local)
        objects[:] = [local, *self.others]


def test_23_check_passes_only_for_installed_overlays(farm: Farm) -> None:
    site = farm("one")
    with pytest.raises(OverlayError, match="is not the one that hf-rocm") as refused:
        hf_rocm.check("llama", transformers_path=site.path)
    assert "hf-rocm install-overlays" in (refused.value.hint or "")
    with pytest.raises(OverlayError, match="no ranks to compare with"):
        hf_rocm.check("llama", transformers_path=site.path, across_ranks=True)
    install(["llama"], transformers_path=site.path)
    result = hf_rocm.check("llama", strict=True, transformers_path=site.path)
    assert result == hf_rocm.check("llama", expected=result, transformers_path=site.path)
    with pytest.raises(OverlayError, match="installed file of bert is not the one"):
        hf_rocm.check(transformers_path=site.path)
    with pytest.raises(OverlayError, match="do not run the same files"):
        hf_rocm.check("llama", expected="0" * 16, transformers_path=site.path)
    file = site.model("llama")
    file.write_text(file.read_text().replace("# <<< hf-rocm", "mine = 1\n# <<< hf-rocm"))
    with pytest.raises(OverlayError, match="is not the one that hf-rocm") as refused:
        hf_rocm.check("llama", transformers_path=site.path)
    assert "reinstall" in (refused.value.hint or "") and refused.value.facts["found"] == "the block was edited"


def test_23_a_node_with_different_files_stops_every_rank(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    site = farm("one")
    install(transformers_path=site.path)
    actual = hf_rocm.check(transformers_path=site.path, across_ranks=False)
    monkeypatch.setitem(sys.modules, "torch.distributed", Ranks(("node-1", actual, None)))
    assert hf_rocm.check(transformers_path=site.path) == actual
    monkeypatch.setitem(sys.modules, "torch.distributed", Ranks(("node-1", actual, None), ("node-2", "f" * 16, None)))
    with pytest.raises(OverlayError, match="do not run the same files") as refused:
        hf_rocm.check(transformers_path=site.path)
    assert "rank 2 (host node-2)" in refused.value.facts["found"] and refused.value.hint
    failed = OverlayError("its file was edited", facts={"file": "/there"}, hint="the fix")
    monkeypatch.setitem(sys.modules, "torch.distributed", Ranks(("node-1", "", failed)))
    with pytest.raises(OverlayError, match=r"rank 1 \(host node-1\) failed its check: its file was edited") as refused:
        hf_rocm.check(transformers_path=site.path)
    assert refused.value.hint == "the fix"
    uninstall(transformers_path=site.path)
    ranks = Ranks(("node-1", actual, None))
    monkeypatch.setitem(sys.modules, "torch.distributed", ranks)
    with pytest.raises(OverlayError, match="is not the one that hf-rocm"):
        hf_rocm.check(transformers_path=site.path)
    assert isinstance(ranks.sent[0][2], OverlayError), "the other ranks got no error and would wait forever"


WORKER = """
import sys
import torch.distributed as distributed
import hf_rocm
rank, site, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
try:
    print(hf_rocm.check(transformers_path=site))
except hf_rocm.HfRocmError as error:
    sys.exit(f"{error}")
finally:
    # gloo's threads abort an interpreter that exits while they are working
    distributed.barrier()
    distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_23_two_real_ranks_compare_their_files(farm: Farm, tmp_path: Path, same: bool) -> None:
    sites = [farm("one"), farm("two")]
    install(transformers_path=sites[0].path)
    with pytest.MonkeyPatch.context() as older:
        if not same:
            older.setattr("hf_rocm.overlay.state.__version__", "0.0.1")
        install(transformers_path=sites[1].path)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(site.path), str(tmp_path / "store")],
            env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, site in enumerate(sites)
    ]  # fmt: skip
    results = [(*process.communicate(timeout=120), process.returncode) for process in ranks]
    if same:
        assert [code for *_, code in results] == [0, 0], results
        assert results[0][0] == results[1][0]
    else:
        assert [code for *_, code in results] == [1, 1], results
        assert "rank 1 (host " in results[0][1] and "hf-rocm install-overlays" in results[0][1]


def make_newer(site: Site, release: str, *, changed: str = "") -> None:
    site.forget_record()
    site.set_release(release)
    for model in MODELS:
        file = site.model(model)
        text = file.read_text() + f"# {release}\n"
        file.unlink()
        file.write_text(text.replace("(nn.Module):", "(nn.Module):\n    new = 1\n") if model == changed else text)


def test_13_a_newer_release_is_reported_file_by_file(farm: Farm, capsys: pytest.CaptureFixture[str]) -> None:
    site = farm("one")
    installed = site.installation.version
    release = next_release("5.99.0")
    make_newer(site, release, changed="llama")
    supported = installed.startswith("5.23")
    assert check_version(["--transformers-path", str(site.path), "--json"]) == 1
    newer_release = json.loads(capsys.readouterr().out)["newer_release"]
    go_on = {file["model"]: file["go_on"] for file in newer_release["files"]}
    assert go_on.keys() == set(MODELS) and not go_on["llama"]
    if supported:
        assert go_on == {"bert": True, "gemma": True, "llama": False, "qwen3": True}
        assert newer_release["verdict"].startswith("proceed with bert, gemma, qwen3; llama would stay stock")
    check_version(["--transformers-path", str(site.path)])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{release} is newer than {newer_release['newest_checked']}" in shown
    assert "llama: do not proceed; upstream changed Llama" in shown and newer_release["verdict"] in shown


def test_13_a_release_beyond_every_range_is_refused_and_reported(
    farm: Farm, capsys: pytest.CaptureFixture[str]
) -> None:
    site = farm("one")
    make_newer(site, "6.1.0")
    assert check_version(["--transformers-path", str(site.path)]) == 1
    shown = capsys.readouterr()
    assert all(f"{model}: do not proceed; " in shown.out for model in MODELS)
    assert "do not proceed" in shown.out and "upgrade hf-rocm" in shown.err
    with pytest.raises(OverlayError, match="no overlay"):
        install(transformers_path=site.path)


def test_13_a_known_release_has_no_report_on_newer_releases(farm: Farm, capsys: pytest.CaptureFixture[str]) -> None:
    check_version(["--transformers-path", str(farm("one").path), "--json"])
    assert json.loads(capsys.readouterr().out)["newer_release"] is None
