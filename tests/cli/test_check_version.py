"""`python -m hf_rocm.check_version`: fast, with few imports, and correct."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_rocm import variables
from hf_rocm.check_version import main
from hf_rocm.overlay import facts
from hf_rocm.overlay.commands import install
from tests.cli.conftest import Outcome
from tests.overlay.conftest import MODELS, Site, next_release

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import sys, runpy
sys.argv = ["check_version", "--json", *sys.argv[1:]]
try:
    runpy.run_module("hf_rocm.check_version", run_name="__main__")
except SystemExit as stop:
    heavy = {"torch", "transformers", "typer", "rich", "aiter", "triton", "numpy"} & set(sys.modules)
    print(sorted(heavy), stop.code, file=sys.stderr)
"""


@pytest.fixture
def check(site: Site, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*arguments: str) -> Outcome:
        code = main(["--transformers-path", str(site.path), *arguments])
        return Outcome(code, *capsys.readouterr())

    return run


def test_it_takes_little_cpu_time_and_imports_nothing_heavy(site: Site) -> None:
    install(transformers_path=site.path)

    def timed(*command: str) -> tuple[float, subprocess.CompletedProcess[str]]:
        # Measure CPU time, which depends little on other load.
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime, result

    runs = [timed("-c", PROBE, "--transformers-path", str(site.path)) for _ in range(5)]
    baseline = min(timed("-c", "import asyncio")[0] for _ in range(5))
    result = runs[-1][1]
    assert result.stderr.strip() == "[] 0"
    assert {file["match"] for file in json.loads(result.stdout)["files"]} == {"verified"}
    assert min(seconds for seconds, _ in runs) < max(1.0, 10 * baseline)


def test_the_exit_code_is_zero_only_if_all_named_overlays_are_installed(
    check: Callable[..., Outcome], site: Site
) -> None:
    missing = check()
    assert missing.code == 1 and "hf-rocm install-overlays" in missing.err
    install(["llama"], transformers_path=site.path)
    assert check("llama").code == 0
    assert check("llama", "bert").code == 1
    partial = check()
    assert partial.code == 1 and "`python -m hf_rocm.check_version llama`" in partial.err
    assert "check_version llama" not in check("llama", "bert").err
    install(transformers_path=site.path)
    assert check().code == check("--strict").code == 0


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("0", "models with installed overlays stay stock\n"),
        ("1", "models with installed overlays run the ROCm path only because HF_ROCM_FORCE=1 is set\n"),
        ("maybe", "models with installed overlays stay stock (HF_ROCM_FORCE=maybe is not valid)\n"),
    ],
)
def test_a_torch_without_rocm_is_reported_together_with_the_forced_path(
    value: str, sentence: str, check: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HF_ROCM_FORCE", value)
    assert sentence in check("llama").out


def test_a_misspelt_variable_causes_a_warning_on_stderr(
    check: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_ROCM_FROCE", "1")
    monkeypatch.setattr(variables, "_warned", set())
    json.loads(check("--json").out)
    assert caplog.messages == ["HF_ROCM_FROCE is not an option of hf_rocm; did you mean HF_ROCM_FORCE?"]


def test_strict_requires_verified_files(check: Callable[..., Outcome], site: Site) -> None:
    site.forget_record()
    site.set_release(next_release(site.installation.version))
    site.model("llama").write_bytes(site.model("llama").read_bytes() + b"# newer\n")
    install(["llama"], transformers_path=site.path)
    assert check("llama").code == 0
    strict = check("llama", "--strict")
    assert strict.code == 1 and "drop --strict" in strict.err


def test_it_shows_which_directory_serves_which_model(check: Callable[..., Outcome], site: Site) -> None:
    shown = check(*MODELS).out
    rows = {
        line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.split()[:1] and "transformers-" in line
    }
    assert str(site.root) in shown and site.installation.version in shown
    for model in MODELS:
        assert rows[model][0].startswith("transformers-") and rows[model][0].endswith(f"/{model}")
        assert rows[model][1:3] == ["no", "verified"]


def test_json_has_the_state_of_every_file_and_the_facts(check: Callable[..., Outcome]) -> None:
    data = json.loads(check("--json").out)
    assert data["ok"] is False
    assert {file["installed"] for file in data["files"]} == {"no"}
    assert data["torch"]["version"] and set(data["torch"]) == {"path", "version", "hip", "rocm", "cuda"}
    assert set(data["rocm"]) == {"version", "device"}
    assert set(data["aiter"]) == {"path", "amd", "version", "sentence"}


def test_a_refusal_exits_with_one_and_prints_the_whole_error(check: Callable[..., Outcome], site: Site) -> None:
    refused = check("mistrall", "--json")
    assert refused.code == 1
    assert json.loads(refused.out)["hint"] and "mistrall" in refused.err
    site.set_release("6.1.0")
    assert check().code == 1


def test_usage_errors_exit_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--nonsense"])
    assert stop.value.code == 2


def package(folder: Path, name: str, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Reduce the search path to this folder, so that the installed torch and aiter are not found."""
    for name in ("torch", "aiter"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


BROKEN = "raise RuntimeError('imported')\n"


def test_facts_of_torch_are_read_from_its_source(bare_path: Path) -> None:
    assert facts.torch_facts().version is None
    text = "__version__ = '2.9.0+rocm7.1'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.1.25'\n"
    package(bare_path, "torch", {"__init__.py": BROKEN, "version.py": text})
    actual = facts.torch_facts()
    assert (actual.version, actual.hip, actual.cuda) == ("2.9.0+rocm7.1", "7.1.25", None)


def test_amd_aiter_is_distinguished_from_its_namesake_without_imports(bare_path: Path) -> None:
    assert facts.aiter_facts().sentence == "not installed"
    package(bare_path, "aiter", {"__init__.py": BROKEN})
    metadata = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"
    package(bare_path, "aiter-0.13.dist-info", {"METADATA": metadata.format("aiter", "0.13")})
    namesake = facts.aiter_facts()
    assert not namesake.amd and namesake.version == "0.13"
    assert "unrelated" in namesake.sentence and "pip install amd-aiter" in namesake.sentence
    package(bare_path, "aiter", {"jit/core.py": BROKEN, "ops/mha.py": BROKEN})
    package(bare_path, "amd_aiter-0.1.9.dist-info", {"METADATA": metadata.format("amd-aiter", "0.1.9")})
    amd = facts.aiter_facts()
    assert amd.amd and amd.sentence == "amd-aiter 0.1.9"
