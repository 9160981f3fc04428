"""Parts of doctor: parsing of tool outputs, and checks that few recorded machines trigger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hf_rocm.architectures import gfx_of_target, gfx_of_version
from hf_rocm.tools.doctor import rocminfo
from hf_rocm.tools.doctor.checks.aiter import aiter
from hf_rocm.tools.doctor.checks.allocator import allocator
from hf_rocm.tools.doctor.checks.driver import driver
from hf_rocm.tools.doctor.checks.gpus import override
from hf_rocm.tools.doctor.checks.options import options
from hf_rocm.tools.doctor.checks.packages import packages
from hf_rocm.tools.doctor.checks.rocm import rocm
from hf_rocm.tools.doctor.checks.system import system
from hf_rocm.tools.doctor.checks.torch import NEWEST_TESTED, torch
from hf_rocm.tools.doctor.checks.torch_settings import torch_settings
from hf_rocm.tools.doctor.checks.transformers import transformers
from hf_rocm.tools.doctor.checks.triton import triton
from hf_rocm.tools.doctor.collect import collect
from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.machine import CommandResult, Node, TaskResult, ThisMachine
from hf_rocm.tools.doctor.transformers import TransformersFacts, required, transformers_facts
from tests.tools.recorded import Recorded


@pytest.fixture(scope="module")
def good() -> Facts:
    return collect(Recorded("mi300x"))


def with_environment(facts: Facts, **variables: str) -> Facts:
    return replace(facts, environment={**facts.environment, **variables})


def levels(findings) -> list[str]:
    return [finding.level.value for finding in findings]


def test_architectures_are_read_from_the_drivers_number_and_from_overrides() -> None:
    numbers = {90402: "gfx942", 90010: "gfx90a", 110501: "gfx1151", 120001: "gfx1201", 100306: "gfx1036", 0: None}
    assert {number: gfx_of_target(number) for number in numbers} == numbers
    assert (gfx_of_version("9.4.2"), gfx_of_version("9.0.10"), gfx_of_version("11")) == ("gfx942", "gfx90a", None)


def test_rocminfo_is_parsed_with_trailing_blanks_and_without_agents() -> None:
    text = "*******\nAgent 2\n*******                  \n  Name:                    gfx90a             \n"
    text += "  Marketing Name:          AMD Instinct MI210                 \n  Device Type:             GPU     \n"
    result = rocminfo.agents(text.replace("Agent 2\n", "Agent 2                  \n"))
    assert [(gpu.name, gpu.card, gpu.units) for gpu in result] == [("gfx90a", "AMD Instinct MI210", 0)]
    assert rocminfo.agents("") == () and rocminfo.complaint("all is well") is None
    failed = "hsa api call failure at: rocminfo.cc:1306\nCall returned HSA_STATUS_ERROR_OUT_OF_RESOURCES"
    assert rocminfo.complaint(failed) == "hsa api call failure at: rocminfo.cc:1306"


def test_a_hanging_rocminfo_and_a_rocm_outside_opt_are_reported(good: Facts) -> None:
    hanging = replace(good, rocm=replace(good.rocm, rocminfo=CommandResult(None), agents=()))
    assert any("timed out" in finding.what for finding in rocm(hanging))
    without_rocm = replace(good, rocm=replace(good.rocm, rocminfo=None, version=None))
    assert "torch includes the libraries of ROCm 7.1" in next(rocm(without_rocm)).what
    packaged = replace(without_rocm, packages={**good.packages, "rocm-sdk-core": "7.10.0"})
    assert "ROCm 7.10.0, as a Python package" in next(rocm(packaged)).what
    other = replace(good, rocm=replace(good.rocm, version="6.4.1"))
    assert (next(rocm(other)).level.value, next(rocm(other)).check) == ("warning", "rocm")


@pytest.mark.parametrize(
    ("container", "fix"),
    [("podman", "podman run --device=/dev/kfd"), ("apptainer", "--rocm"), ("kubernetes", "amd.com/gpu")],
)
def test_every_kind_of_container_has_its_own_advice(good: Facts, container: str, fix: str) -> None:
    changed = replace(good, container=container, driver=replace(good.driver, kfd=None))
    assert fix in next(driver(changed)).fix


def test_missing_or_unreadable_device_files_are_reported(good: Facts) -> None:
    without_render = replace(good, container="docker", driver=replace(good.driver, render={}))
    finding = next(driver(without_render))
    assert finding.level.value == "problem" and "--device=/dev/dri" in finding.fix
    kfd = Node(mode="crw-rw----", group="nogroup", readable=False, writable=False)
    rootless = replace(good, container="podman", driver=replace(good.driver, kfd=kfd))
    assert "keep-groups" in next(driver(rootless)).fix
    render = dict(good.driver.render)
    # Another container's GPU.
    render["/dev/dri/renderD130"] = Node(readable=False, writable=False, group="render")
    assert next(driver(replace(good, driver=replace(good.driver, render=render)))).level.value == "ok"


def test_a_driver_that_is_not_loaded_or_lacks_compute_support_has_a_fix(good: Facts) -> None:
    changed = replace(good, driver=replace(good.driver, kfd=None, loaded=False))
    assert "modprobe amdgpu" in next(driver(changed)).fix
    changed = replace(good, driver=replace(good.driver, kfd=None))
    assert "dmesg" in next(driver(changed)).fix


def test_wsl_without_dxg_has_a_fix(good: Facts) -> None:
    assert "wsl --update" in next(driver(replace(good, wsl=True, driver=replace(good.driver, dxg=False)))).fix


@pytest.mark.parametrize("value", ["", "-1"])
def test_variables_that_hide_every_gpu_are_a_problem(good: Facts, value: str) -> None:
    findings = list(driver(with_environment(good, HIP_VISIBLE_DEVICES=value)))
    assert levels(findings) == ["ok", "problem"] and findings[1].fix == "unset HIP_VISIBLE_DEVICES"


def test_variables_that_select_different_gpus_are_a_warning(good: Facts) -> None:
    assert levels(driver(with_environment(good, ROCR_VISIBLE_DEVICES="1"))) == ["ok", "ok"]
    both = with_environment(good, HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1")
    assert levels(driver(both)) == ["ok", "ok", "warning"]


def test_an_invalid_override_is_a_warning(good: Facts) -> None:
    assert levels(override(with_environment(good, HSA_OVERRIDE_GFX_VERSION="9.4.2"))) == ["ok"]
    assert levels(override(with_environment(good, HSA_OVERRIDE_GFX_VERSION="gfx942"))) == ["warning"]
    assert levels(override(good)) == []


def test_a_torch_that_is_missing_or_old_or_computes_wrong_results_is_reported(good: Facts) -> None:
    assert "torch is not installed" in next(torch(replace(good, torch=replace(good.torch, version=None)))).what
    old = replace(good, torch=replace(good.torch, version="2.4.1+rocm6.1"))
    assert "older than 2.6" in next(torch(old)).what
    device = {**good.devices[0], "gemm": "a 64 × 64 GEMM is wrong by up to 3"}
    wrong = replace(good.torch_result, facts={**good.torch_result.facts, "devices": [device]})
    result = {finding.check: finding for finding in torch(replace(good, torch_result=wrong))}
    assert result["torch-gpu"].level.value == "problem" and "wrong by up to 3" in result["torch-gpu"].what


@pytest.mark.parametrize(
    ("arch", "built", "runs"),
    [
        ("gfx942", "gfx9-4-generic", True),
        ("gfx942", "gfx9-generic", False),
        ("gfx90a", "gfx9-generic", False),
        ("gfx906", "gfx9-generic", True),
        ("gfx1151", "gfx11-generic", True),
        ("gfx1030", "gfx10-1-generic", False),
        ("gfx1250", "gfx12-generic", False),
    ],
)
def test_a_generic_build_supports_the_architectures_that_llvm_lists(
    good: Facts, arch: str, built: str, runs: bool
) -> None:
    devices = [{**good.devices[0], "arch": arch}]
    facts = {**good.torch_result.facts, "built_for": [built], "devices": devices}
    text = str(list(torch(replace(good, torch_result=replace(good.torch_result, facts=facts)))))
    assert ("torch was not built" not in text) is runs


def test_missing_flags_and_nvidia_variables_are_reported(good: Facts) -> None:
    facts = {**good.torch_result.facts, "flags": {"backends.cuda.matmul.allow_tf32": "AttributeError: no"}}
    findings = list(torch_settings(replace(good, torch_result=replace(good.torch_result, facts=facts))))
    assert findings[0].level.value == "warning" and "setup_environment" in findings[0].fix
    changed = [row.what for row in torch_settings(with_environment(good, NVIDIA_TF32_OVERRIDE="1"))]
    assert any("NVIDIA_TF32_OVERRIDE=1: without effect" in line for line in changed)
    tuned = with_environment(good, PYTORCH_TUNABLEOP_ENABLED="1", PYTORCH_TUNABLEOP_TUNING="0")
    assert set(levels(torch_settings(tuned))) == {"ok"}


def with_packages(facts: Facts, **versions: str) -> Facts:
    distributions = {name.replace("_", "-"): version for name, version in versions.items()}
    return replace(facts, packages={**facts.packages, **distributions})


def with_torch_facts(facts: Facts, **info: object) -> Facts:
    result = facts.torch_result
    return replace(facts, torch_result=replace(result, facts={**result.facts, **info}))


def radeon(facts: Facts, *gpus: str) -> Facts:
    return replace(facts, driver=replace(facts.driver, gpus=gpus))


def test_unsupported_releases_and_cards_of_aiter_are_reported(good: Facts) -> None:
    old = radeon(with_packages(good, amd_aiter="0.1.9.post1"), "gfx1201")
    first = next(aiter(old))
    assert first.level.value == "warning" and "older than 0.1.19, the first release that supports gfx1201" in first.what
    newer = with_packages(good, amd_aiter="0.1.22+rocm7.2")
    first = next(aiter(newer))
    assert first.level.value == "warning" and "newer than 0.1.21.dev46, the newest release" in first.what
    assert next(aiter(with_packages(good, amd_aiter="0.1.20.post1+rocm7.2"))).level.value == "ok"
    assert "no kernels for gfx1030" in next(aiter(radeon(good, "gfx1030"))).what


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("ModuleNotFoundError: No module named 'pandas'", "pip install pandas"),
        ("ImportError: x.so: undefined symbol: _ZN5torch", "rm -rf /venv/aiter/jit/module_*.so"),
        ("RuntimeError: ROCm version file not found", "fix what the checks rocm, rocminfo and tools report"),
        ("KeyError: 'gfx1151'", "python -c 'import aiter' shows the whole error"),
    ],
)
def test_every_failed_import_of_aiter_has_its_own_fix(good: Facts, error: str, fix: str) -> None:
    failed = replace(good, aiter=replace(good.aiter, result=TaskResult({}, error, "import")))
    (match,) = (row for row in aiter(failed) if row.check == "aiter-import")
    assert match.level.value == "problem" and match.fix.startswith(fix)


@pytest.mark.parametrize(
    ("versions", "level", "words"),
    [
        ({"triton-rocm": "3.6.0"}, "ok", "triton-rocm 3.6.0"),
        ({"triton": "3.9.0"}, "warning", "newer than 3.6"),
        ({"triton": "3.1.0"}, "warning", "older than 3.2"),
        ({}, "warning", "Triton, which a ROCm build of torch depends on, is not installed"),
        ({"triton": "3.6.0", "pytorch-triton-rocm": "3.5.1"}, "problem", "overwrite each other's files"),
    ],
)
def test_unsuitable_tritons_are_reported(good: Facts, versions: dict[str, str], level: str, words: str) -> None:
    (finding,) = triton(replace(good, packages=versions))
    assert finding.level.value == level and words in f"{finding.what}; {finding.means}"


def test_the_oldest_triton_is_the_one_that_the_kernels_require() -> None:
    from hf_rocm.ops.triton import detect
    from hf_rocm.tools.doctor.checks.triton import OLDEST

    assert OLDEST == detect.OLDEST


def test_an_allocator_that_was_not_tested_or_failed_is_reported(good: Facts) -> None:
    changed = with_environment(good, PYTORCH_ALLOC_CONF="max_split_size_mb:128")
    assert "not tested: there is no GPU" in next(allocator(with_torch_facts(changed, allocator=None))).what
    failed = with_torch_facts(changed, allocator={"error": "ArithmeticError: a live block was overwritten"})
    (finding,) = allocator(failed)
    assert finding.level.value == "problem" and "fails with max_split_size_mb:128: ArithmeticError" in finding.what


def test_an_override_for_a_card_that_torch_does_not_support_is_a_warning(good: Facts) -> None:
    laptop = with_environment(radeon(good, "gfx1103"), HSA_OVERRIDE_GFX_VERSION="11.0.0")
    (finding,) = override(laptop)
    assert finding.level.value == "warning" and "hf-rocm verify" in finding.fix


def test_old_and_leftover_packages_are_reported(good: Facts) -> None:
    old = replace(with_packages(good, bitsandbytes="0.46.1"), files={"bitsandbytes_rocm": True})
    assert "older than 0.50" in next(packages(old)).what
    leftover = with_packages(good, nvidia_cublas_cu12="12.8", nvidia_cudnn_cu12="9.1")
    assert "still installed: 2 (nvidia-…)" in next(packages(leftover)).what


@pytest.mark.parametrize(("installed", "count"), [("no", "none"), ("yes", "3")])
def test_a_changed_file_without_a_block_is_a_warning(good: Facts, installed: str, count: str) -> None:
    changed = replace(good.transformers, overlays={f"{installed}/verified": 3, "no/changed": 1})
    finding = next(row for row in transformers(replace(good, transformers=changed)) if row.check == "overlays")
    assert finding.level.value == "warning" and finding.fix.startswith("hf-rocm status")
    assert finding.what == f"1 model file differs from its release; 3 overlays match, {count} installed"


def test_overlays_of_another_hf_rocm_are_a_warning_and_kernels_in_range_is_ok(good: Facts) -> None:
    older = replace(good, transformers=replace(good.transformers, overlays={"old/verified": 3, "no/verified": 72}))
    result = {row.check: row for row in transformers(with_packages(older, kernels="0.18.5", unsloth="2026.10.9"))}
    assert result["overlays"].fix == "hf-rocm install-overlays" and result["overlays"].level.value == "warning"
    assert result["kernels"].level.value == "ok" and "Unsloth" in result["patches"].what


def test_a_mac_is_a_problem(good: Facts) -> None:
    (finding,) = system(replace(good, system=replace(good.system, name="Darwin")))
    assert finding.level.value == "problem" and "this is Darwin" in finding.what


def test_invalid_and_restricting_variables_of_hf_rocm_are_reported(good: Facts) -> None:
    (wrong,) = options(with_environment(good, HF_ROCM_TIER="fastest"))
    assert wrong.level.value == "problem" and "HF_ROCM_TIER=fastest: unknown tier 'fastest'" in wrong.what
    for name in ("HF_ROCM_FORCE", "HF_ROCM_AUTO"):
        (wrong,) = options(with_environment(good, **{name: "maybe"}))
        assert wrong.level.value == "problem" and f"{name}=maybe is not valid" in wrong.what and name in wrong.fix
    (finding,) = options(with_environment(good, HF_ROCM_PROBE="0", HF_ROCM_TIER="attention=torch"))
    assert finding.level.value == "warning" and finding.fix.startswith("unset HF_ROCM_PROBE HF_ROCM_TIER")
    assert levels(options(with_environment(good, HF_ROCM_AUTO="1"))) == ["ok"]
    # Valid variables would add a finding.
    (misspelt,) = options(with_environment(good, HF_ROCM_FROCE="1"))
    assert misspelt.level.value == "warning" and misspelt.fix == "unset HF_ROCM_FROCE, or rename it to HF_ROCM_FORCE"
    _, valid = options(with_environment(good, HF_ROCM_FROCE="1", HF_ROCM_AUTO="1"))
    assert (valid.level.value, valid.what) == ("ok", "HF_ROCM_AUTO=1")


def test_a_transformers_newer_than_the_last_checked_release_is_reported(good: Facts) -> None:
    for verdict, level in (
        ("proceed: every overlay can be used", "ok"),
        ("do not proceed: none can be used", "warning"),
    ):
        newer = replace(good.transformers, version="5.99.0", outlook=verdict)
        first = next(transformers(replace(good, transformers=newer)))
        assert (first.level.value, first.check) == (level, "transformers") and "5.99.0 is newer" in first.what


def test_the_range_of_the_kernels_package_is_read_from_transformers_table(tmp_path: Path) -> None:
    table = tmp_path / "table.py"
    table.write_text('deps = {"accelerate": "accelerate>=1", "kernels": "kernels>=0.18.2,<0.19"}\n')
    assert required(table, "kernels") == "kernels>=0.18.2,<0.19"
    assert required(table, "absent") is None and required(tmp_path / "none.py", "kernels") is None


def test_a_transformers_that_is_missing_or_cannot_be_patched_is_reported(good: Facts) -> None:
    absent = TransformersFacts(refused="transformers is not installed", hint="pip install transformers")
    (match,) = transformers(replace(good, transformers=absent))
    assert (match.level.value, match.fix) == ("problem", "pip install transformers")
    checkout = replace(good.transformers, refused="this is a source checkout", hint="install a release")
    match = next(
        finding for finding in transformers(replace(good, transformers=checkout)) if finding.check == "overlays"
    )
    assert (match.level.value, match.fix) == ("warning", "install a release")


def test_the_installed_transformers_and_its_overlays_are_read_from_files() -> None:
    import transformers

    facts = transformers_facts()
    assert facts.version == transformers.__version__ and facts.refused is None
    assert facts.kernels is not None and facts.kernels.startswith("kernels>=")
    assert sum(facts.overlays.values()) > 40


def test_missing_files_and_commands_raise_no_error(tmp_path: Path) -> None:
    machine = ThisMachine()
    missing = str(tmp_path / "missing")
    assert (machine.text(missing), machine.names(missing), machine.look(missing), machine.free_bytes(missing)) == (
        None,
        (),
        None,
        None,
    )
    assert machine.run("hf-rocm-has-no-such-tool", timeout=1) is None
    assert machine.run("sleep", "5", timeout=0.1) == CommandResult(None)
    file = tmp_path / "library.so"
    file.write_bytes(b"ELF\0libcudart.so.12\0")
    assert machine.mentions(str(file), b"libcudart.so") and not machine.mentions(str(file), b"libamdhip64")
    file.write_bytes(b"")
    assert not machine.mentions(str(file), b"x") and not machine.mentions(missing, b"x")


def test_a_block_with_foreign_code_in_a_known_file_is_a_problem(good: Facts) -> None:
    changed = replace(good.transformers, overlays={"yes/verified": 70, "foreign/verified": 2, "old/verified": 1})
    finding = next(row for row in transformers(replace(good, transformers=changed)) if row.check == "overlays")
    assert finding.level.value == "problem" and finding.what.startswith("2 blocks with code that is not from")
    assert finding.fix.startswith("hf-rocm install-overlays")


def test_a_cuda_build_without_an_nvidia_gpu_is_noted_and_the_newest_tested_torch_is_that_of_the_tests(good) -> None:
    facts = collect(Recorded("no-gpu-cuda-torch"))
    assert "no NVIDIA GPU here" in next(iter(torch(facts))).what
    for machine in (replace(facts, files={"nvidia_device": True}), collect(Recorded("nvidia")), good):
        assert "no NVIDIA GPU here" not in next(iter(torch(machine))).what
    constraints = Path(__file__).resolve().parents[2] / "scripts" / "constraints.txt"
    assert f"torch=={NEWEST_TESTED}" in constraints.read_text(encoding="utf-8").split()
    (finding,) = torch(replace(facts, torch=replace(facts.torch, version=f"{NEWEST_TESTED}+cpu", cuda=None)))
    assert "newer" not in finding.what
