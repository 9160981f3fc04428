"""`setup_environment`: the allocator's settings and PyTorch's flags are correct with every build."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import hf_rocm
from hf_rocm import environment
from hf_rocm.errors import OptionError
from hf_rocm.overlay.facts import TorchFacts

BOTH = "max_split_size_mb:128,expandable_segments:True"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that calls `setup_environment` with a simulated build of torch.

    The function returns (result, effective settings). Its argument `hip` is None for a build without ROCm.
    """
    for name in environment.ALLOCATOR:
        # Set the variable first, so that monkeypatch restores it after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def call(*, hip: str | None = "7.2", user_settings: dict[str, str] | None = None, **actual: object):
        for name, value in (user_settings or {}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(environment, "torch_facts", lambda: TorchFacts("", "2.11.0", hip, None))
        lines = hf_rocm.setup_environment(**actual)
        result = hf_rocm.options.environment()
        return lines, {name: result[name] for name in environment.ALLOCATOR if result.get(name)}

    return call


@pytest.mark.parametrize("allocator", [3, True, ["expandable_segments:True"]])
def test_settings_that_are_not_strings_are_refused(settings, allocator) -> None:
    with pytest.raises(OptionError, match=r"allocator=.* is not valid") as caught:
        settings(allocator=allocator)
    assert "expandable_segments:True" in caught.value.facts["allowed"]


def test_the_allocators_setting_is_written_to_the_variable_that_all_releases_read(settings) -> None:
    lines, result = settings(allocator="expandable_segments:True")
    assert result == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert lines == ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]


def test_without_arguments_nothing_changes(settings) -> None:
    assert settings() == ([], {})


@pytest.mark.parametrize("user_settings", [None, {"PYTORCH_HIP_ALLOC_CONF": BOTH}])
def test_on_rocm_max_split_size_is_removed_if_segments_are_expandable(
    settings, user_settings: dict[str, str] | None
) -> None:
    lines, result = settings(allocator=None if user_settings else BOTH, user_settings=user_settings)
    assert list(result.values()) == ["expandable_segments:True"]
    assert "expandable_segments:True" in lines[0]


def test_on_other_builds_incompatible_settings_are_unchanged(settings) -> None:
    assert settings(hip=None, allocator=BOTH)[1] == {"PYTORCH_CUDA_ALLOC_CONF": BOTH}


@pytest.mark.parametrize("setting", ["max_split_size_mb:128", "expandable_segments:False,max_split_size_mb:128"])
def test_compatible_settings_are_unchanged(settings, setting: str) -> None:
    assert settings(allocator=setting)[1] == {"PYTORCH_CUDA_ALLOC_CONF": setting}


def test_the_users_setting_has_precedence_and_is_reported(settings) -> None:
    lines, result = settings(
        allocator="expandable_segments:True", user_settings={"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    )
    assert result == {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert lines == ["PYTORCH_ALLOC_CONF=max_split_size_mb:64 in the environment overrides expandable_segments:True"]


def test_a_change_after_the_first_use_is_an_error_unless_the_setting_is_the_same(
    settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(allocator="expandable_segments:True")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert settings(allocator="expandable_segments:True")[0] == []
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    with pytest.raises(OptionError, match="already in use"):
        settings(allocator="expandable_segments:True")


def test_flags_that_the_build_lacks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cudnn.benchmark
    try:
        assert hf_rocm.setup_environment(cudnn_benchmark=True) == ["torch.backends.cudnn.benchmark=True"]
        assert torch.backends.cudnn.benchmark is True
    finally:
        torch.backends.cudnn.benchmark = before

    class Bare:
        """The GEMM settings of a build that lacks the flag."""

    monkeypatch.setattr(torch.backends.cuda, "matmul", Bare())
    lines = hf_rocm.setup_environment(tf32=torch.backends.cudnn.allow_tf32)
    assert lines[0].startswith("skipped torch.backends.cuda.matmul.allow_tf32: ")
    assert not hasattr(torch.backends.cuda.matmul, "allow_tf32")


def test_without_flags_torch_is_not_imported() -> None:
    program = (
        "import sys, hf_rocm; hf_rocm.setup_environment(allocator='expandable_segments:True');"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
