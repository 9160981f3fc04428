"""A prepared encoder's results in uncaptured and replayed calls, and the calls in which forwards are recorded."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm import options
from hf_rocm.forwards import host_reads, state
from hf_rocm.forwards.host_reads import Program
from hf_rocm.forwards.recorded import RecordedForward
from hf_rocm.forwards.state import SETTINGS, known
from tests.forwards.conftest import call, counted, equal, reasons
from tests.forwards.families import inputs, make

# The last call is replayed without a comparison.
CALLS = 6


def test_a_shape_is_recorded_at_its_second_call(pair):
    prepared, stock = pair()
    progress = []
    for seed in range(CALLS):
        arguments = inputs("bert", seed=seed)
        assert equal(call(prepared, arguments), call(stock, arguments))
        progress.append((*counted(prepared), known(prepared).compared))
    # the first call runs uncaptured, the second is recorded, three are compared, and the last is replayed
    assert progress == [(0, 0, 0), (1, 0, 0), (1, 0, 0), (1, 1, 1), (1, 2, 2), (1, 3, 2)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_path_depends_on_the_values_of_the_mask(mode, pair):
    """transformers reads the values of the mask on every call, and drops a mask without padding."""
    prepared, stock = pair()
    with mode():
        for seed in range(18):
            arguments = inputs("bert", seed=seed, padded=0 if seed < 6 else (0, 2, 3)[seed % 3])
            assert equal(prepared(**arguments), stock(**arguments))
        assert counted(prepared)[0] == 2 and counted(prepared)[1] > 6
        for padded in (None, 0, 1, 5):
            arguments = inputs("bert", padded=padded)
            assert equal(prepared(**arguments), stock(**arguments))


@pytest.fixture
def events(monkeypatch):
    """The replays and the reads on the host, in order."""
    log = []

    def watch(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: log.append(name) or function(*args))

    watch(RecordedForward, "copies")
    watch(Program, "__call__")
    return log


def test_no_replay_is_predicted_from_a_number(pair, events, monkeypatch):
    """If a recording depends on a number, it is not replayed before the host has read this number.

    A recording for another number could use an index that is out of range.
    """
    prepared, stock = pair()
    monkeypatch.setattr(host_reads, "typed", lambda value: (int, value))
    for number in range(12):
        events.clear()
        arguments = inputs("bert", seed=number, padded=0)
        assert equal(call(prepared, arguments), call(stock, arguments)), number
        assert events == ([] if number < 2 else ["__call__", "copies"])


def test_a_likely_replay_is_queued_before_the_mask_is_read(pair, events):
    prepared, stock = pair()
    read = "__call__"
    expected = [
        (0, []),  # seen
        (0, []),  # recorded
        *[(0, [read, "copies"])] * 3,  # compared
        (0, ["copies", read]),
        (0, [read, "copies"]),  # compared
        # The results of this replay are dropped.
        (2, ["copies", read]),
        (2, [read]),  # recorded
        (2, [read, "copies"]),  # compared
        # The two previous calls did not replay the same recording.
        *[(0, [read, "copies"])] * 2,
        (0, ["copies", read]),
    ]
    for number, (padded, order) in enumerate(expected):
        events.clear()
        arguments = inputs("bert", seed=number, padded=padded)
        assert equal(call(prepared, arguments), call(stock, arguments)), number
        assert events == order, (number, events)
    orders = []
    for number in range(24):
        events.clear()
        arguments = inputs("bert", seed=number, padded=(0, 0, 2)[number % 3])
        assert equal(call(prepared, arguments), call(stock, arguments)), number
        orders.append(list(events))
    # in calls with this order, the results of the first replay are dropped, and the right recording is replayed
    assert orders.count(["copies", read, "copies"]) > 4


@pytest.mark.parametrize(
    "flags",
    [
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"return_dict": False},
        {"position_ids": torch.arange(7).flip(0)[None]},
        {"token_type_ids": torch.ones(2, 7, dtype=torch.long)},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_calls_with_further_arguments_equal_stock(flags, pair):
    prepared, stock = pair()
    # The first call with outputs to collect installs transformers' hooks.
    for seed in range(CALLS + 2):
        arguments = {**inputs("bert", seed=seed, padded=1), **flags}
        assert equal(call(prepared, arguments), call(stock, arguments))
    assert counted(prepared)[1] > 2 and not reasons(prepared)


def test_images_of_another_size_are_recorded(pair):
    prepared, stock = pair("vit")
    for seed in range(CALLS):
        arguments = {"pixel_values": torch.randn(1, 3, 32, 40, generator=torch.Generator().manual_seed(seed))}
        assert equal(
            call(prepared, arguments, interpolate_pos_encoding=True),
            call(stock, arguments, interpolate_pos_encoding=True),
        )
    assert counted(prepared)[1] == 3


def test_outputs_belong_to_the_caller(pair):
    prepared, _ = pair()
    arguments = [inputs("bert", seed=seed) for seed in range(CALLS)]
    kept = [call(prepared, inputs) for inputs in arguments]
    values = [copy.deepcopy(output) for output in kept]
    kept[-1].last_hidden_state.fill_(7)
    again = call(prepared, arguments[-1])
    assert equal(again, values[-1])
    assert all(equal(one, other) for one, other in zip(kept[:-1], values[:-1], strict=True))


def test_repeated_outputs_keep_their_identity(pair):
    prepared, _ = pair()
    for _ in range(CALLS):
        output = call(prepared, inputs("bert"), output_hidden_states=True)
    assert output.hidden_states[-1] is output.last_hidden_state


@pytest.mark.usefixtures("exact_lengths")
def test_only_the_shapes_used_last_stay_recorded(pair, monkeypatch):
    monkeypatch.setattr(state, "MOST", 3)
    prepared, stock = pair()
    for length in (3, 4, 5, 6, 7, 3):
        for seed in range(4):
            arguments = inputs("bert", length=length, seed=seed)
            assert equal(call(prepared, arguments), call(stock, arguments))
        assert known(prepared).summary()[0] <= 3
    # The recording of length 3 was dropped, so this length was recorded a second time.
    assert counted(prepared)[0] == 6


def test_the_memory_of_recordings_is_bounded(pair):
    prepared, stock = pair()
    with options.override(graphs_memory="0"):
        for _ in range(5):
            assert equal(call(prepared, inputs("bert")), call(stock, inputs("bert")))
    assert counted(prepared) == (0, 0) and "more than HF_ROCM_GRAPHS_MEMORY=0 allows" in reasons(prepared)[0]


@pytest.mark.usefixtures("exact_lengths")
def test_threads_replay_concurrently(pair):
    prepared, stock = pair()
    wrong = []

    def work(length):
        for seed in range(8):
            arguments = inputs("bert", length=length, seed=seed)
            if not equal(call(prepared, arguments), call(stock, arguments)):
                wrong.append((length, seed))

    threads = [threading.Thread(target=work, args=(length,)) for length in (5, 7, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and counted(prepared)[1] > 5


def test_switching_between_two_states_records_each_once(pair):
    """The states differ in a plain attribute of a module, as when PEFT switches adapters."""
    prepared, stock = pair()
    recorded = []
    for epsilon in (1e-12, 1.0, 1e-12, 1.0):
        for model in (prepared, stock):
            model.embeddings.LayerNorm.eps = epsilon
        for seed in range(5):
            arguments = inputs("bert", seed=seed)
            assert equal(call(prepared, arguments), call(stock, arguments))
        recorded.append(counted(prepared)[0])
    assert recorded == [1, 2, 2, 2]


def test_a_changed_config_takes_effect(pair):
    prepared, stock = pair("classifier")
    for output in (False, True):
        for model in (prepared, stock):
            model.config.output_hidden_states = output
        for seed in range(5):
            arguments = inputs("classifier", seed=seed)
            assert equal(call(prepared, arguments), call(stock, arguments))


def test_copies_have_their_own_recordings_and_restore_frees_them(pair):
    prepared, stock = pair()
    before = vars(type(prepared)).get("forward")
    for _ in range(4):
        call(prepared, inputs("bert"))
    twin, again = copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))
    for model in (twin, again):
        assert known(model) is None
        for seed in range(5):
            assert equal(call(model, inputs("bert", seed=seed)), call(stock, inputs("bert", seed=seed)))
        assert counted(model)[1]
    for model in (prepared, twin, again):
        assert vars(type(prepared))["forward"] is before
        hf_rocm.restore(model)
        assert known(model) is None and SETTINGS not in model.__dict__
    assert vars(transformers.BertModel)["forward"] is not before
    assert not hasattr(vars(transformers.BertModel)["forward"], "__wrapped__") or "hf_rocm" not in str(
        vars(transformers.BertModel)["forward"].__code__.co_filename
    )


@pytest.mark.parametrize("name", ["bert", "modernbert", "siglip", "clip-text"])
def test_recordings_are_freed_with_their_model(name, pair):
    prepared, _ = pair(name)
    for _ in range(4):
        call(prepared, inputs(name))
    assert counted(prepared)[0] == 1
    references = weakref.ref(prepared), weakref.ref(known(prepared)), weakref.ref(next(prepared.parameters()))
    del prepared
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_an_encoder_inside_a_generating_model_is_recorded(recorded_on_cpu):
    vision = transformers.SiglipVisionConfig(**{**make("siglip").config.to_dict()})
    text = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    torch.manual_seed(0)
    stock = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=5)
    ).eval()
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    # The name of the model itself, whose prompts are recorded, is empty.
    (name,) = [name for name, module in prepared.named_modules() if SETTINGS in module.__dict__ and name]
    assert name.endswith("vision_tower")
    tower = prepared.get_submodule(name)
    arguments = inputs("siglip")
    for _ in range(5):
        actual = call(tower, arguments).last_hidden_state
    torch.testing.assert_close(actual, call(stock.get_submodule(name), arguments).last_hidden_state)
    assert counted(tower)[1]
    assert any(line.startswith(f"{name}: forwards are recorded") for line in hf_rocm.explain(prepared).forwards)


def test_explain_lists_recorded_and_uncaptured_forwards(pair):
    prepared, _ = pair()
    assert hf_rocm.explain(prepared).forwards == ("forwards are recorded and replayed",)
    for _ in range(5):
        call(prepared, inputs("bert"))
    prepared(**inputs("bert"))
    lines = hf_rocm.explain(prepared).forwards
    assert lines[:2] == ("forwards are recorded and replayed", "recorded forwards: 1, replayed forwards: 2")
    assert lines[2].startswith("kernels of the most recently used recording: ") and lines[2].endswith(" by torch")
    assert lines[-1].startswith("uncaptured × 1: gradients are enabled")
    assert (
        "recorded forwards: 1" in str(hf_rocm.explain(prepared))
        and "uncaptured × 1" in hf_rocm.explain(prepared).details()
    )
    hf_rocm.prepare(prepared, force=True, graphs=False)
    assert hf_rocm.explain(prepared).forwards == ("forwards run uncaptured: graphs are switched off",)
