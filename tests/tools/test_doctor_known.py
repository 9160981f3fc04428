"""Rules for known faults, applied to facts that match and to facts just outside the range; their links and remedies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_rocm.cli import main
from hf_rocm.tools.doctor import examine, kernels
from hf_rocm.tools.doctor.checks.known import RULES, graph_events, known
from hf_rocm.tools.doctor.checks.packages import packages
from hf_rocm.tools.doctor.checks.torch import install
from hf_rocm.tools.doctor.checks.transformers import transformers
from hf_rocm.tools.doctor.collect import collect
from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.machine import System, TaskResult
from hf_rocm.tools.doctor.model import ModelFacts, model_facts
from hf_rocm.tools.doctor.report import Finding
from hf_rocm.tools.doctor.transformers import hub_facts
from tests.tools.recorded import Recorded


@pytest.fixture(scope="module")
def good() -> Facts:
    return collect(Recorded("mi300x"))


def applied(facts: Facts) -> list[Finding]:
    """Returns the findings that are shown for these facts. Every rule must return a finding."""
    findings = list(known(facts))
    assert {finding.check for finding in findings} == {rule.name for rule in RULES}
    for finding in findings:
        assert finding.shown or (finding.level.value == "ok" and finding.link.startswith("https://github.com/"))
        if finding.level.value != "ok":
            assert finding.means and finding.fix and finding.link.startswith("https://github.com/"), finding
    return [finding for finding in findings if finding.shown]


def with_gpu(facts: Facts, gfx: str, **torch_facts: str | None) -> Facts:
    driver = replace(facts.driver, gpus=(gfx,))
    return replace(facts, driver=driver, torch=replace(facts.torch, **torch_facts))


def test_a_machine_without_known_faults_has_no_findings(good: Facts) -> None:
    assert not applied(good)
    without = replace(good, driver=replace(good.driver, gpus=(), cards=()), rocm=replace(good.rocm, agents=()))
    assert not list(known(replace(without, torch=replace(good.torch, hip=None))))


@pytest.mark.parametrize(
    ("gfx", "torch_facts", "system", "bundled", "reported"),
    [
        ("gfx942", {"version": "2.11.0+rocm7.2", "hip": "7.2.26015"}, "7.2.0", True, True),
        # torch bundles its own copy of ROCm's libraries
        ("gfx942", {"version": "2.11.0+rocm7.2", "hip": "7.2.26015"}, "7.2.4", True, True),
        ("gfx942", {"version": "2.11.0+rocm7.2", "hip": "7.2.26015"}, "7.2.4", False, False),
        ("gfx942", {"version": "2.9.1", "hip": "7.2.26015"}, "7.2.1", False, True),
        ("gfx942", {"version": "2.11.0+rocm7.1", "hip": "7.1.25424"}, "7.1.1", True, False),
        ("gfx942", {"version": "2.13.0", "hip": "7.15.1", "rocm": "10.0.0"}, "10.0.0", True, False),
        ("gfx90a", {"version": "2.11.0+rocm7.2", "hip": "7.2.26015"}, "7.2.0", True, False),
        ("gfx1201", {"version": "2.11.0+rocm7.1", "hip": "7.1.25424"}, None, True, True),
    ],
)
def test_releases_that_break_graph_replays_are_reported(
    good: Facts, gfx: str, torch_facts, system: str | None, bundled: bool, reported: bool
) -> None:
    facts = replace(
        with_gpu(good, gfx, **torch_facts),
        rocm=replace(good.rocm, version=system),
        files={**good.files, "torch_rocm": bundled},
    )
    shown = applied(facts)
    assert [finding.check for finding in shown] == ["graphs"] * reported
    if reported:
        assert gfx in shown[0].what and "HF_ROCM_GRAPHS=0" in shown[0].fix
        disabled = applied(replace(facts, environment={"HF_ROCM_GRAPHS": "0"}))
        assert [finding.level.value for finding in disabled] == ["ok"]


def test_recommended_builds_of_torch_avoid_broken_graph_replays() -> None:
    """A ROCm release that breaks a GPU's graph replays is not recommended for that GPU, unless every release does."""
    releases = {gfx: install(gfx).rpartition("rocm")[2] for gfx in ("gfx942", "gfx950", "gfx1100", "gfx1201")}
    assert releases == {"gfx942": "7.1", "gfx950": "7.1", "gfx1100": "7.2", "gfx1201": "7.2"}
    assert install().endswith("7.2") and install("gfx1100", "gfx942").endswith("7.1")


def test_replays_that_differed_are_a_warning_only_with_the_same_torch_or_driver_and_have_a_fix() -> None:
    facts = collect(Recorded("graphs-mi300x"))
    (event,) = facts.graph_events
    other = replace(event, torch="2.10.0+rocm7.0", driver="6.0.5", checkpoint="org/other")
    assert event.driver == facts.driver.version and facts.driver.loaded
    (finding,) = graph_events(replace(facts, graph_events=(event, other)))
    assert finding.level.value == "warning" and finding.what.startswith("1 replay differed")
    assert finding.fix.startswith("HF_ROCM_GRAPHS=1 hf-rocm verify org/model   # ") and facts.ledger in finding.fix
    (finding,) = graph_events(replace(facts, graph_events=(other,)))
    assert finding.level.value == "ok" and "1 did with torch 2.10.0+rocm7.0" in finding.what
    (finding,) = graph_events(replace(facts, graph_events=(replace(other, driver=event.driver),)))
    assert finding.level.value == "warning"

    forced = "HF_ROCM_GRAPHS=1 hf-rocm verify org/model --force   # "
    for machine, start in (("nvidia", forced), ("no-gpu", "rm /home")):
        facts = collect(Recorded(machine))
        (finding,) = graph_events(replace(facts, graph_events=(replace(event, torch=facts.torch.version or ""),)))
        assert finding.level.value == "warning" and finding.fix.startswith(start) and facts.ledger in finding.fix


@pytest.mark.parametrize(
    ("kernel", "gfx", "level"),
    [
        ("7.0.0-28-generic", "gfx1100", "warning"),
        ("7.0.12-201.fc44.x86_64", "gfx1200", "warning"),
        ("6.14.0-35-generic", "gfx1151", "ok"),
        ("7.0.0-14-generic", "gfx1100", None),
    ],
)
def test_kernels_that_stall_in_copies_from_mapped_files_are_reported(
    good: Facts, kernel: str, gfx: str, level: str | None
) -> None:
    facts = replace(with_gpu(good, gfx), system=System("Linux", kernel, "3.12.3"))
    findings = [finding for finding in applied(facts) if finding.check == "mapped-copies"]
    assert [finding.level.value for finding in findings] == [level] * (level is not None)
    if findings:
        assert "through ordinary memory" in findings[0].what + findings[0].means


def test_bitsandbytes_is_checked_by_its_results(good: Facts) -> None:
    facts = replace(good, packages={**good.packages, "bitsandbytes": "0.49.0"}, files={"bitsandbytes_rocm": True})
    right = replace(facts, bitsandbytes=TaskResult({"gemms": {"0": None, "1": None}}))
    assert [finding.level.value for finding in applied(right)] == ["ok"]
    # with correct results, bitsandbytes' version is not reported
    assert [finding.what for finding in packages(right)] == ["none that are made only for NVIDIA GPUs"]
    wrong = replace(facts, bitsandbytes=TaskResult({"gemms": {"0": None, "1": "a GEMM of 8 rows is off by 1"}}))
    (finding,) = applied(wrong)
    assert (finding.level.value, finding.check) == ("problem", "bitsandbytes")
    assert "GPU 1 (gfx942): a GEMM of 8 rows" in finding.what and "BNB_ROCM_ARCH=gfx942" in finding.fix
    crashed = replace(facts, bitsandbytes=TaskResult({}, "it was killed by signal 11", "a 4-bit GEMM on GPU 0"))
    assert "signal 11" in applied(crashed)[0].what
    # Without results, the version is checked.
    assert any("older than 0.50" in finding.what for finding in packages(facts))


@pytest.mark.parametrize(
    ("result", "level"),
    [
        (TaskResult({}, "it was killed by signal 11", "a Conv3d on GPU 0"), "problem"),
        (TaskResult({"seconds": {"0": [3.5, 0.002]}}), "warning"),
        (TaskResult({"seconds": {"0": [0.003, 0.002]}}), "ok"),
    ],
)
def test_a_slow_or_crashing_conv3d_is_reported(good: Facts, result: TaskResult, level: str) -> None:
    model = ModelFacts("org/qwen-vl", conv3d=True)
    facts = replace(good, model=model, patch_embedding=result)
    (finding,) = applied(facts)
    assert (finding.level.value, finding.check) == (level, "patch-embedding")
    if level != "ok":
        assert "hf_rocm.prepare" in finding.fix


def test_a_model_with_a_conv3d_is_recognised_and_its_conv3d_is_run(tmp_path: Path, good: Facts) -> None:
    config = {"model_type": "qwen3_vl", "vision_config": {"temporal_patch_size": 2}, "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = model_facts(str(tmp_path), cache=tmp_path, memory=None)
    assert model.conv3d and not model.sinks
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    model = model_facts(str(tmp_path), cache=tmp_path, memory=None)
    assert model.sinks and not model.conv3d

    requests = []

    class Recording(Recorded):
        def run_task(self, task: str, *, timeout: float) -> TaskResult:
            requests.append(task)
            return super().run_task(task, timeout=timeout)

    collect(Recording("mi300x"), model=str(tmp_path))
    assert sorted(requests) == ["aiter", "torch"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    collect(Recording("stalling-kernel"), model=str(tmp_path))
    assert {"bitsandbytes", "patch-embedding"} <= set(requests)


def test_the_slower_backward_of_rocm_10_is_reported(good: Facts) -> None:
    ten = {"version": "2.13.0+rocm10.0.0", "hip": "7.15.26333", "rocm": "10.0.0"}
    assert [finding.check for finding in applied(with_gpu(good, "gfx950", **ten))] == ["backward"]
    assert not applied(with_gpu(good, "gfx942", **ten))
    assert not applied(with_gpu(good, "gfx950"))


@pytest.mark.parametrize(
    ("kernels_version", "hub", "reported"),
    [
        ("0.17.1", {"hub_rope": 2, "hub_flash": True}, ["hub-rope", "hub-flash"]),
        ("0.17.1", {"hub_rope": 3, "hub_flash": True}, ["hub-flash"]),
        ("0.17.1", {}, []),
        # This release is out of range, so no Hub kernel is used.
        ("0.18.0", {"hub_rope": 2, "hub_flash": True}, []),
        (None, {"hub_rope": 2, "hub_flash": True}, []),
    ],
)
def test_faulty_hub_kernels_are_reported(good: Facts, kernels_version: str | None, hub, reported: list[str]) -> None:
    packages = {**good.packages, **({"kernels": kernels_version} if kernels_version else {})}
    facts = replace(
        good,
        packages=packages,
        transformers=replace(good.transformers, version="5.19.0", kernels="kernels>=0.16,<0.18", **hub),
    )
    assert [finding.check for finding in applied(facts)] == reported


def test_padded_rows_in_fp16_are_reported(good: Facts) -> None:
    half = replace(good, model=ModelFacts("org/model", dtype="float16"))
    assert [finding.check for finding in applied(half)] == ["padded-rows"]
    assert not applied(replace(half, transformers=replace(good.transformers, version="4.57.6")))
    assert not applied(replace(good, model=ModelFacts("org/model", dtype="bfloat16")))


def test_a_kernels_package_out_of_range_is_reported_with_the_disabled_features(good: Facts) -> None:
    facts = replace(good, packages={**good.packages, "kernels": "0.17.2"})
    (finding,) = (finding for finding in transformers(facts) if finding.check == "kernels")
    assert finding.level.value == "warning"
    for disabled in ("use_kernels=True", "flash attention from the Hub", "FP8", "MXFP4"):
        assert disabled in finding.means
    assert finding.link.startswith("https://github.com/huggingface/transformers/")


def test_hub_kernels_are_read_from_the_installed_transformers() -> None:
    """transformers 5.16 to 5.22 use version 2 of the aiter-rope kernel."""
    from importlib.util import find_spec

    import transformers as installed
    from packaging.version import Version

    root = Path(str(find_spec("transformers").origin)).parent
    release, facts = Version(installed.__version__), hub_facts(root)
    if release < Version("5.16"):
        assert facts == {"hub_rope": None, "hub_flash": False}
    else:
        assert facts["hub_rope"] in (2, 3) and facts["hub_flash"]
    assert hub_facts(root / "nowhere") == {"hub_rope": None, "hub_flash": False}


class Bitsandbytes:
    """A stand-in for bitsandbytes' NF4, computed by PyTorch on a CPU, with or without a fault."""

    values = torch.tensor(
        [-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0]
    )

    def __init__(self, fault: str | None = None) -> None:
        self.fault, self.functional = fault, self

    def quantize_4bit(self, weight, *, blocksize, quant_type):
        assert quant_type == "nf4"
        blocks = weight.float().reshape(-1, blocksize)
        absmax = blocks.abs().amax(-1, keepdim=True)
        codes = (blocks / absmax)[..., None].sub(self.values).abs().argmin(-1)
        return codes, (absmax, weight.shape)

    def dequantize_4bit(self, codes, state):
        absmax, shape = state
        if self.fault == "absmax":
            absmax = absmax.roll(1, 0)
        return (self.values[codes] * absmax).reshape(shape).bfloat16()

    def matmul_4bit(self, x, packed, *, quant_state):
        result = x @ self.dequantize_4bit(packed.t(), quant_state).t()
        wrong = {"one row": len(x) == 1, "rows": len(x) > 1}.get(str(self.fault), False)
        return result.roll(1, -1) if wrong else result


@pytest.mark.parametrize(
    ("fault", "words"),
    [(None, None), ("one row", "1 row is off"), ("rows", "8 rows is off"), ("absmax", "unpacked weights are off")],
)
def test_the_probe_of_4_bit_gemms_detects_every_fault(fault: str | None, words: str | None) -> None:
    reason = kernels.four_bit_gemm(torch, Bitsandbytes(fault), "cpu")
    assert reason is None if words is None else words in str(reason)


def test_the_probe_of_a_conv3d_returns_two_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PATCHES", 3)
    monkeypatch.setattr(kernels, "EMBEDDING", 8)
    convolution, gemm = kernels.patch_embedding(torch, "cpu")
    assert convolution > 0 and gemm > 0


def test_rules_that_do_not_apply_are_listed_on_request(
    good: Facts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examine, "ThisMachine", lambda: Recorded("mi300x"))
    main(["doctor"])
    short = capsys.readouterr().out
    assert "not here:" not in short
    assert main(["doctor", "--all"]) == 0
    long = capsys.readouterr().out
    for rule in RULES:
        assert f"ok       {rule.name} " in long and rule.link in long
    # Rules that do not apply are not counted in the verdict.
    assert short.splitlines()[-1] == long.splitlines()[-1]
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    main(["doctor", "-v", "--json"])
    assert len(json.loads(capsys.readouterr().out)["findings"]) == len(findings) + len(RULES)
