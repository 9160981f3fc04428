"""Encoder forwards in recorded graphs on a GPU: replays equal uncaptured forwards, even with concurrent work."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import hf_rocm
from hf_rocm import options
from hf_rocm.forwards.state import known
from tests.forwards import soak
from tests.forwards.conftest import call, counted, equal, reasons, tensors
from tests.forwards.families import FAMILIES, inputs, make, padded_families
from tests.threads import running

pytestmark = pytest.mark.gpu

# Families whose forward copies host tensors to the GPU. Such copies can't be recorded, so these models run uncaptured.
COPIES = ("mpnet",)


@pytest.fixture(autouse=True)
def unprobed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path / "cache"))
    # First-use checks take seconds, and other tests cover them.
    with options.override(probe=False):
        yield


def build(name, dtype=torch.float32):
    """Returns (a model that is recorded, a prepared model that is never recorded, the stock model)."""
    stock = make(name).to("cuda", dtype)
    prepared, twin = copy.deepcopy(stock), copy.deepcopy(stock)
    return hf_rocm.prepare(prepared, force=True), hf_rocm.prepare(twin, force=True, graphs=False), stock


def on_gpu(arguments, dtype=torch.float32):
    moved = {}
    for name, value in arguments.items():
        tensor = isinstance(value, torch.Tensor)
        moved[name] = value.to("cuda", dtype if value.is_floating_point() else None) if tensor else value
    return moved


def close(result, expected, dtype):
    """Compare up to rounding: an uncaptured padded batch may run in a kernel without masks, while replays use masks."""
    scale = 32 * torch.finfo(dtype).eps
    for actual, reference in zip(tensors(result), tensors(expected), strict=True):
        torch.testing.assert_close(actual, reference, rtol=scale, atol=scale * float(reference.abs().max()))


def assert_replayed(prepared, name, *, at_least):
    if name in COPIES:
        assert counted(prepared)[1] == 0 and any("copies between devices" in reason for reason in reasons(prepared))
        return
    assert known(prepared).disabled is None
    assert counted(prepared)[1] >= at_least, (counted(prepared), reasons(prepared))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_random_calls_equal_stock(name):
    with options.override(pad_tokens=0):
        models, wrong = soak.differing(name, same=soak.close, device="cuda")
    assert wrong == []
    assert_replayed(models.prepared, name, at_least=40)


@pytest.mark.parametrize("name", padded_families())
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_random_lengths_equal_stock(name):
    models, wrong = soak.differing(name, same=soak.close, lengths=range(4, 62), device="cuda")
    assert wrong == []
    assert_replayed(models.prepared, name, at_least=40)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_that_can_be_recorded_is_recorded(name):
    prepared, twin, _ = build(name)
    for seed in range(6):
        for padded in (0, 2):
            arguments = on_gpu(inputs(name, seed=seed, padded=padded))
            close(call(prepared, arguments), call(twin, arguments), torch.float32)
    assert_replayed(prepared, name, at_least=3)
    assert name in COPIES or not reasons(prepared), reasons(prepared)


def test_a_call_without_a_mask_is_recorded():
    prepared, twin, _ = build("bert")
    for seed in range(6):
        arguments = on_gpu(inputs("bert", seed=seed, padded=None))
        assert equal(call(prepared, arguments), call(twin, arguments))
    assert counted(prepared)[1] == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_is_computed_just_before_the_call_is_read_correctly(mode):
    """The mask is read on a side stream, while the replay predicted from earlier calls runs on the current stream."""
    prepared, twin, _ = build("bert")
    slow = torch.randn(4096, 4096, device="cuda")
    with mode(), options.override(pad_tokens=0):
        for seed in range(60):
            arguments = on_gpu(inputs("bert", seed=seed, padded=2 * (seed % 7 == 6)))
            for _ in range(20):
                slow = torch.tanh(slow @ slow)
            # This tensor is available only after the GEMMs.
            zero = (slow.sum() * 0).long()
            arguments["attention_mask"] = arguments["attention_mask"] + zero
            close(prepared(**arguments), twin(**arguments), torch.float32)
    assert known(prepared).disabled is None
    assert counted(prepared)[0] == 2 and counted(prepared)[1] > 40, (counted(prepared), reasons(prepared))


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "classifier"])
def test_mixed_lengths_share_a_recording(name):
    prepared, twin, _ = build(name)
    for seed in range(20):
        arguments = on_gpu(inputs(name, length=5 + 7 * seed % 27, seed=seed, padded=seed % 3))
        close(call(prepared, arguments), call(twin, arguments), torch.float32)
    assert set(known(prepared).padded) == {32} and counted(prepared)[0] == 1 and counted(prepared)[1] > 8


def test_threads_on_separate_streams_return_correct_results():
    prepared, twin, _ = build("bert")
    other, other_twin, _ = build("vit")
    wrong = []

    def work(name, model, expected, length):
        with torch.cuda.stream(torch.cuda.Stream()):
            for seed in range(40):
                arguments = on_gpu(inputs(name, length=length, seed=seed))
                if not equal(call(model, arguments), call(expected, arguments)):
                    wrong.append((name, length, seed))
            torch.cuda.current_stream().synchronize()

    jobs = [
        ("bert", prepared, twin, 7),
        ("bert", prepared, twin, 9),
        ("bert", prepared, twin, 7),
        ("vit", other, other_twin, 7),
    ]
    with options.override(pad_tokens=0), running(*(partial(work, *job) for job in jobs), interval=1e-4) as errors:
        pass
    assert not errors and not wrong and counted(prepared)[1] > 40 and counted(other)[1] > 20


def test_an_encoder_and_a_decoding_model_alternate():
    from tests.generation.conftest import make as make_decoder

    decoder = make_decoder("llama").cuda()
    decoder = hf_rocm.prepare(decoder, force=True)
    prepared, twin, _ = build("bert")
    ids = torch.randint(3, 61, (2, 7), device="cuda")
    expected = decoder.generate(ids, max_new_tokens=12, do_sample=False)
    for seed in range(8):
        arguments = on_gpu(inputs("bert", seed=seed))
        assert equal(call(prepared, arguments), call(twin, arguments))
        assert torch.equal(decoder.generate(ids, max_new_tokens=12, do_sample=False), expected)
    assert counted(prepared)[1] > 3


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_the_host_does_not_wait_without_a_mask():
    prepared, _, _ = build("vit")
    arguments = on_gpu(inputs("vit"))
    for _ in range(12):
        call(prepared, arguments)
    torch.cuda.synchronize()
    replayed = counted(prepared)[1]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            call(prepared, arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counted(prepared)[1] == replayed + 3


def test_memory_stays_within_the_limit():
    prepared, _, _ = build("bert")
    with options.override(graphs_memory="2MiB", pad_tokens=0):
        for length in range(3, 40):
            for seed in range(3):
                call(prepared, on_gpu(inputs("bert", length=length, seed=seed)))
            assert known(prepared).summary()[1] <= 2 * 2**20
