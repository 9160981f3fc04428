"""`hf-rocm explain` and `hf-rocm warmup` on a small checkpoint, and errors of these and other commands."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
import torch

from hf_rocm.cli import main
from tests.parity import models


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(models.save_checkpoint("llama", tmp_path_factory.mktemp("llama"), torch.bfloat16))


def test_explain_is_short_and_names_every_reason_once(checkpoint, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", checkpoint, "--force", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "served by hf_rocm, forced on this machine" in out
    assert "fused: q_proj + k_proj + v_proj" in out
    assert out.count("aiter needs an AMD GPU under ROCm, but this is the CPU") == 1
    assert len(out.splitlines()) <= 25 and max(map(len, out.splitlines())) <= 80


def test_explain_all_lists_every_kernel(checkpoint, capsys):
    assert main(["explain", checkpoint, "--force", "--device", "cpu", "--all"]) == 0
    out = capsys.readouterr().out
    assert "fused 2 of 2: q_proj + k_proj + v_proj" in out
    assert "linear (q_proj + k_proj + v_proj" in out
    # The reason is printed once, and not under every kernel.
    assert out.count("aiter needs an AMD GPU under ROCm, but this is the CPU") == 1


def test_explain_lists_the_kernels_as_json(checkpoint, capsys):
    assert main(["explain", checkpoint, "--force", "--device", "cpu", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    listed = {kernel["operation"] for kernel in data["kernels"]}
    assert listed == {"attention", "linear", "act_and_mul", "add_rms_norm", "rms_norm", "rope", "rotary_angles"}


def test_explain_without_force_reports_a_stock_model(checkpoint, capsys):
    assert main(["explain", checkpoint, "--device", "cpu"]) == 0
    assert "stock, because" in capsys.readouterr().out


def test_warmup_lists_every_kernel(checkpoint, capsys):
    assert main(["warmup", checkpoint, "--force", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "SDPA" in out and "F.linear" in out and "ready after" in out


def test_warmup_has_nothing_to_do_on_a_stock_model(checkpoint, capsys):
    assert main(["warmup", checkpoint, "--device", "cpu"]) == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["explain", "warmup"])
def test_the_reason_for_stock_is_printed_once_and_wrapped(command, checkpoint, capsys, caplog, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main([command, checkpoint, "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert " ".join(captured.out.split()).count("this PyTorch is not a ROCm build") == 1
    assert "ROCm build" not in captured.err and "stays stock" not in caplog.text
    assert max(map(len, captured.out.splitlines())) <= 60


@pytest.mark.parametrize("command", ["explain", "warmup"])
def test_a_model_that_cannot_be_loaded_causes_one_error(command, tmp_path, checkpoint, capsys):
    assert main([command, str(tmp_path / "nothing")]) == 1
    assert "no model could be loaded" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([command, str(tmp_path / "empty")]) == 1
    assert "no model could be loaded" in capsys.readouterr().err
    assert main([command, checkpoint, "--device", "cuda:99"]) == 1
    assert "there is no device 'cuda:99' here" in capsys.readouterr().err


def test_repeated_attempts_to_reach_the_hub_cause_one_line(capfd, monkeypatch):
    hub = logging.getLogger("huggingface_hub")
    handler = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(hub, "handlers", [handler])

    def retrying(*_, **__):
        for attempt in range(5):
            hub.warning(f"thrown while requesting HEAD, attempt {attempt}")
        raise OSError("no connection")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", retrying)
    assert main(["explain", "meta-llama/nosuch"]) == 1
    error = capfd.readouterr().err
    assert error.count("thrown while requesting") == 1 and "no connection" in error
    assert not handler.filters


@pytest.mark.parametrize("command", ["explain", "verify", "bench", "quantize", "tune", "warmup"])
def test_a_folder_that_does_not_exist_is_refused_before_anything_is_loaded(command, capsys, monkeypatch):
    monkeypatch.setattr("hf_rocm.loading.pretrained.from_pretrained", None)
    assert main([command, "./no-such-model"]) == 1
    shown = capsys.readouterr().err
    assert "no model could be loaded from './no-such-model'" in shown and "the folder does not exist" in shown


def test_the_hub_is_named_before_a_model_is_looked_up_there(checkpoint, capsys, monkeypatch):
    def unreachable(*_, **__):
        shown.append(capsys.readouterr().err)
        raise OSError("no connection")

    shown = []
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    assert main(["explain", "meta-llama/nosuch"]) == 1
    assert "note: 'meta-llama/nosuch' is not a folder here, so it is looked up on the Hugging Face Hub" in shown[0]
    assert main(["explain", checkpoint]) == 1
    assert "hub" not in shown[1]


def test_the_filter_is_also_set_if_the_hub_was_not_imported_yet():
    code = """if True:
        import logging
        from hf_rocm.tools.load import _without_repeated_warnings
        with _without_repeated_warnings():
            import transformers
            transformers.AutoConfig
            handlers = logging.getLogger("huggingface_hub").handlers
            print(len(handlers), all(handler.filters for handler in handlers))
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["1", "True"]


@pytest.mark.parametrize(("word", "near"), [("serv", "serve"), ("chek", "check")])
def test_a_correction_is_suggested_for_a_misspelt_command_of_a_group(word, near, capsys):
    group = "bench" if near == "serve" else "tune"
    assert main([group, word, "llama"]) == 2
    assert f"No such command {word!r}. Did you mean {near!r}?" in " ".join(capsys.readouterr().err.split())
