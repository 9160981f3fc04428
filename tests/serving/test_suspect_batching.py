"""If graphs have a known fault, continuous batching records no graphs by default.

Otherwise, the default of transformers applies.
"""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import transformers

import hf_rocm
from tests.generation.conftest import make, recorded_on_cpu, suspect_gpu  # noqa: F401 - fixtures
from tests.serving.batching import HAS_BATCHING, RELEASE

CONFIG = getattr(transformers.generation, "ContinuousBatchingConfig", None)
# 4.56 and 4.57 record no graphs, and raise if graphs are requested
RECORDS = RELEASE.major >= 5 or not HAS_BATCHING
LINK = "issues/279"


@pytest.fixture(autouse=True)
def graphs_available(monkeypatch):
    """Make transformers record graphs by default, as on a GPU with flash attention."""
    if RELEASE.major == 4:
        return
    from transformers.generation import continuous_batching as package

    # 5.0 has no ContinuousBatchingConfig.
    if CONFIG is None:
        monkeypatch.setattr(package.continuous_api, "attn_mask_is_needed", lambda config: False)
    else:
        monkeypatch.setattr(package.initialization, "get_accelerator_graph_name", lambda: "cuda")
        monkeypatch.setattr(package.initialization, "is_flash_attention_requested", lambda *_, **__: True)


def configs(**changes):
    """Returns (the config that has `use_cuda_graph` in this release, the arguments that pass it)."""
    generation = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1)
    if CONFIG is not None:
        config = CONFIG(auto_switch_to_flash=False, **changes)
        return config, {"generation_config": generation, "continuous_batching_config": config}
    for name, value in changes.items():
        setattr(generation, name, value)
    return generation, {"generation_config": generation}


def records(model, **arguments):
    """Whether this model's manager would record graphs. The manager is not started."""
    manager = model.init_continuous_batching(**arguments)
    if CONFIG is None:
        return manager.use_cuda_graph
    varlen, decode = manager.continuous_batching_config.cuda_graph_booleans
    assert varlen == decode
    return decode


def prepared(**arguments):
    return hf_rocm.prepare(make("llama"), force=True, **arguments)


def lines(caplog):
    return [record for record in caplog.records if record.name == "hf_rocm" and "continuous batching" in record.message]


def test_without_a_known_fault_the_default_of_transformers_applies(caplog):
    model = prepared()
    assert records(model, **configs()[1]) is RECORDS
    assert not lines(caplog) and "graphs" not in str(hf_rocm.explain(model).decoding)


@pytest.mark.parametrize("with_config", [True, False], ids=["config", "no-config"])
def test_nothing_is_recorded_with_a_known_fault(with_config, suspect_gpu, caplog):  # noqa: F811
    model = prepared()
    config, arguments = configs()
    arguments = arguments if with_config else {}
    assert [records(model, **arguments) for _ in range(2)] == [False, False]
    # The user's config is unchanged.
    assert getattr(config, "use_cuda_graph", None) is None
    assert getattr(model.generation_config, "use_cuda_graph", None) is None
    (line,) = lines(caplog)
    assert LINK in line.message and line.levelno == logging.WARNING
    assert any("continuous batching" in line and LINK in line for line in hf_rocm.explain(model).decoding)
    assert "use_cuda_graph: on gfx942" in " ".join(str(hf_rocm.explain(model)).split())


def test_the_config_is_read_from_its_deprecated_place(suspect_gpu):  # noqa: F811
    if CONFIG is None:
        pytest.skip("not run: this release has no ContinuousBatchingConfig")
    config, arguments = configs(max_batch_tokens=48)
    arguments.pop("continuous_batching_config")
    arguments["generation_config"].continuous_batching_config = config
    manager = prepared().init_continuous_batching(**arguments)
    assert manager.continuous_batching_config.cuda_graph_booleans == (False, False)
    assert manager.continuous_batching_config.max_batch_tokens == 48 and config.use_cuda_graph is None


def test_the_users_request_is_kept(suspect_gpu, caplog):  # noqa: F811
    model = prepared()
    if RECORDS:
        assert records(model, **configs(use_cuda_graph=True)[1])
    else:
        with pytest.raises(NotImplementedError):
            records(model, **configs(use_cuda_graph=True)[1])
    (line,) = lines(caplog)
    assert LINK in line.message and "requested" in line.message


def test_graphs_disabled_by_the_user_are_not_logged(suspect_gpu, caplog):  # noqa: F811
    assert not records(prepared(), **configs(use_cuda_graph=False)[1])
    assert not lines(caplog)


def test_padding_sizes_request_graphs(suspect_gpu, caplog):  # noqa: F811
    if RELEASE.major == 4:
        pytest.skip("not run: this release has no such sizes")
    arguments = configs()[1] if CONFIG is None else configs(q_padding_interval_size=8)[1]
    assert records(prepared(), **arguments, **({"num_q_padding_intervals": 2} if CONFIG is None else {}))
    (line,) = lines(caplog)
    assert LINK in line.message and "requested" in line.message


def test_required_graphs_are_left_to_transformers(suspect_gpu, caplog):  # noqa: F811
    model = prepared(graphs=True)
    assert records(model, **configs()[1]) is RECORDS
    (line,) = lines(caplog)
    assert LINK in line.message and "requested" in line.message
    assert any("continuous batching may record" in line for line in hf_rocm.explain(model).decoding)
    hf_rocm.prepare(model, force=True, graphs=False)
    assert not records(model, **configs()[1])


def test_copies_are_affected_and_other_models_are_not(suspect_gpu):  # noqa: F811
    other, model = make("llama"), prepared()
    assert not records(copy.deepcopy(model), **configs()[1])
    assert records(other, **configs()[1]) is RECORDS
    hf_rocm.restore(model)
    assert records(model, **configs()[1]) is RECORDS
    assert not [name for name in vars(model) if "continuous_batching" in name and name.startswith("_hf_rocm")]


def test_restore_returns_the_original_method_of_the_class(suspect_gpu):  # noqa: F811
    model = prepared()
    assert "init_continuous_batching" in vars(type(model))
    # Free the models of other tests; the next operation undoes their changes.
    gc.collect()
    hf_rocm.restore(model)
    assert "init_continuous_batching" not in vars(type(model))
