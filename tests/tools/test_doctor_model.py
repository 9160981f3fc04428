"""The memory that a model needs, computed from its files, and compared with the memory of the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hf_rocm.tools.doctor.checks.model import model
from hf_rocm.tools.doctor.collect import collect
from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.model import ModelFacts, model_facts
from tests.tools.recorded import Recorded

GIB = 2**30


@pytest.fixture(scope="module")
def good() -> Facts:
    return collect(Recorded("mi300x"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    (tmp_path / "model-00001.safetensors").write_bytes(b"\0" * 3000)
    (tmp_path / "model-00002.safetensors").write_bytes(b"\0" * 1000)
    # The same weights in a different format.
    (tmp_path / "pytorch_model.bin").write_bytes(b"\0" * 4000)
    return tmp_path


def test_a_models_memory_is_computed_from_its_folder(checkpoint: Path) -> None:
    facts = model_facts(str(checkpoint), cache=Path("/nowhere"), memory=None)
    assert (facts.weights, facts.dtype) == (4000, "bfloat16")
    # K and V, layers, KV heads, head dim, bytes.
    assert facts.per_token == 2 * 4 * 2 * 64 * 2


def test_a_hub_model_is_found_only_in_the_cache(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--small" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(checkpoint)
    assert model_facts("org/small", cache=cache, memory=None).weights == 4000
    absent = model_facts("org/other", cache=cache, memory=None)
    assert absent.folder is None and absent.free


@pytest.mark.parametrize(
    ("weights", "release", "expected"),
    [
        (16 * GIB, "5.23.0", {"model": "ok", "model-memory": "ok"}),
        # The model needs 200 GiB in fp32.
        (100 * GIB, "4.57.6", {"model": "ok", "model-memory": "warning", "model-host": "warning"}),
        # The model fits on two GPUs.
        (300 * GIB, "5.23.0", {"model": "ok", "model-memory": "warning", "model-host": "warning"}),
        (500 * GIB, "5.23.0", {"model": "ok", "model-memory": "problem", "model-host": "warning"}),
        (0, "5.23.0", {"model": "problem"}),
    ],
)
def test_models_that_do_not_fit_are_reported(good: Facts, weights: int, release: str, expected: dict[str, str]) -> None:
    big = ModelFacts("org/big", "/cache/big", weights, "bfloat16", per_token=131072, memory=40 * GIB)
    actual = model(replace(good, model=big, transformers=replace(good.transformers, version=release)))
    assert {finding.check: finding.level.value for finding in actual} == expected


@pytest.mark.parametrize(
    ("free", "total", "available", "carved_out", "expected"),
    [
        (63, 64, 120, 0.5, "ok"),
        # Limited by the GPU's total memory.
        (120, 32, 120, 0.5, "problem"),
        # Host processes use the remaining memory.
        (63, 64, 20, 0.5, "problem"),
        # The firmware reserves the GPU's memory.
        (63, 64, 20, 64, "ok"),
    ],
)
def test_a_gpu_without_dedicated_memory_can_use_the_available_host_memory(
    free: int, total: int, available: int, carved_out: float, expected: str
) -> None:
    facts = collect(Recorded("strix-halo"))
    device = {**facts.devices[0], "free": free * GIB, "total": total * GIB}
    result = replace(facts.torch_result, facts={**facts.torch_result.facts, "devices": [device]})
    big = ModelFacts("org/big", "/cache/big", 32 * GIB, "bfloat16", memory=available * GIB)
    driver = replace(facts.driver, carved_out=int(carved_out * GIB))
    actual = model(replace(facts, torch_result=result, model=big, driver=driver))
    assert {finding.check: finding.level.value for finding in actual}["model-memory"] == expected
