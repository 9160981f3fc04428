"""PyTorch's TunableOp is enabled within a block, its results go to hf_rocm's file, and its settings are restored."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.errors import TuningError
from hf_rocm.tools.tuning import tunable
from hf_rocm.tools.tuning.shapes import Gemm


class Settings:
    """A stand-in for the state that TunableOp's functions read and set."""

    def __init__(self) -> None:
        self.state = {"enable": False, "tuning_enable": True, "filename": "user.csv"}
        self.read: list[str] = []

    def install(self, monkeypatch) -> None:
        import torch.cuda.tunable as module

        monkeypatch.setattr(module, "is_enabled", lambda: self.state["enable"])
        monkeypatch.setattr(module, "tuning_is_enabled", lambda: self.state["tuning_enable"])
        monkeypatch.setattr(module, "get_filename", lambda: self.state["filename"])
        monkeypatch.setattr(module, "enable", lambda on: self.state.update(enable=on))
        monkeypatch.setattr(module, "tuning_enable", lambda on: self.state.update(tuning_enable=on))
        monkeypatch.setattr(module, "set_filename", lambda name: self.state.update(filename=name))
        monkeypatch.setattr(module, "read_file", lambda name: self.read.append(name) or True)
        monkeypatch.setattr(module, "get_validators", lambda: (("PT_VERSION", "2.13.0"),))
        monkeypatch.setattr(
            module, "get_results", lambda: (("GemmTunableOp_BFloat16_TN", "tn_1_2_3", "Gemm_Rocblas_7", 0.5),)
        )


def test_the_settings_are_restored_even_after_an_error(monkeypatch, tmp_path):
    settings = Settings()
    settings.install(monkeypatch)
    before = dict(settings.state)
    results = tmp_path / "tunableop.csv"
    with pytest.raises(ZeroDivisionError), tunable.scope(results, tuning=False):
        assert settings.state["enable"] is True and settings.state["tuning_enable"] is False
        assert settings.state["filename"] not in ("user.csv", str(results)), "an existing file would be overwritten"
        raise ZeroDivisionError
    assert settings.state == before and settings.read == []
    results.write_text("Validator,PT_VERSION,2.13.0\n")
    with tunable.scope(results, tuning=True):
        assert settings.read == [str(results)]
    assert settings.state == before


def test_every_gemm_is_run_and_the_results_are_saved(monkeypatch, tmp_path):
    Settings().install(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    ran = []

    def run(shape):
        ran.append(shape)
        if shape.m == 2:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(tunable, "_gemm", run)
    gemms = [Gemm(m, 64, 64, "torch.bfloat16", False) for m in (1, 2, 3)]
    file = tunable.file_for("gfx1100")
    assert tunable.tune(gemms, file) == [gemms[1]] and ran == gemms
    assert file.read_text().splitlines() == [
        "Validator,PT_VERSION,2.13.0",
        "GemmTunableOp_BFloat16_TN,tn_1_2_3,Gemm_Rocblas_7,0.5",
    ]
    assert tunable.variables(file)["PYTORCH_TUNABLEOP_FILENAME"] == str(file)


def test_tuning_without_rocm_is_an_error(tmp_path):
    if torch.version.hip is not None:
        pytest.skip("this torch is a ROCm build")
    with pytest.raises(TuningError, match="needs an AMD GPU under ROCm"):
        tunable.tune([], tmp_path / "t.csv")


@pytest.mark.rocm
def test_on_the_gpu_every_gemm_has_a_result(tmp_path):
    """The real TunableOp finds kernels for three GEMMs, and is disabled afterwards."""
    file = tmp_path / "tunableop.csv"
    gemms = [Gemm(m, 256, 128, "torch.bfloat16", False) for m in (1, 8, 64)]
    assert tunable.tune(gemms, file) == []
    assert sum(line.startswith("GemmTunableOp") for line in file.read_text().splitlines()) >= 3
    assert not torch.cuda.tunable.is_enabled()
