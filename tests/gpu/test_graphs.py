"""Decode steps in recorded graphs on a GPU: replays return stock's tokens, even with concurrent work."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch

import hf_rocm
from hf_rocm import options
from hf_rocm.generation import cache_layer, pool
from hf_rocm.generation.recorded_draw import RecordedDraw
from hf_rocm.generation.recorded_step import largest
from hf_rocm.generation.state import known
from hf_rocm.generation.streams import separate_stream
from tests.generation.conftest import counted, generate, make, outlives_steps_of_others, prompt

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 503}
# number of steps after the prompt whose results are not taken from a replay: the first step, the one that is recorded,
# and the one with the first comparison
FIRST = 3


@pytest.fixture
def pair(monkeypatch):
    """A function that builds (prepared, stock) models on the GPU. Windows move and buffers grow after a few tokens."""
    monkeypatch.setattr(cache_layer, "SLACK", 5)
    monkeypatch.setattr(cache_layer, "LEAST", 16)
    monkeypatch.setattr(pool, "_AHEAD", 32)
    # First-use checks take seconds, and other tests cover them.
    with options.override(probe=False):
        yield build


def build(kind="llama", dtype=torch.float32, graphs=True, **changes):
    stock = make(kind, **{**SIZES, **changes}).to("cuda", dtype)
    return hf_rocm.prepare(copy.deepcopy(stock), force=True, graphs=graphs), stock


def make_inputs(**arguments):
    return {name: tensor.cuda() for name, tensor in prompt(**arguments).items()}


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "mixtral"])
def test_greedy_tokens_equal_stock(kind, padded, pair):
    prepared, stock = pair(kind)
    inputs = make_inputs(padded=padded)
    expected = generate(stock, inputs, new=50)
    for _ in range(2):
        assert torch.equal(generate(prepared, inputs, new=50), expected)
    assert counted(prepared)[1] > 49 and known(prepared).disabled is None


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 40}, {"temperature": 1.2, "top_k": 30, "top_p": 0.9}, {"min_p": 0.1}]
)
def test_sampling_draws_the_same_tokens_as_stock(settings, rows, pair, monkeypatch):
    prepared, stock = pair()
    draw, drawn = RecordedDraw.draw, []
    monkeypatch.setattr(
        RecordedDraw, "draw", lambda self, *arguments: drawn.append(not arguments) or draw(self, *arguments)
    )
    arguments = {"do_sample": True, "new": 30, **settings}
    for seed in (0, 1, 2):
        results = []
        for model in (prepared, stock):
            tokens = generate(model, make_inputs(rows=rows), seed=seed, **arguments)
            results.append((tokens, torch.cuda.get_rng_state()))
        assert all(map(torch.equal, *results))
    assert sum(drawn) > 60 and known(prepared).disabled is None


def test_sampling_with_the_deferred_check_restores_the_random_state(pair):
    prepared, stock = pair()
    free = generate(stock, make_inputs(rows=1), seed=0, new=25, do_sample=True)[0]
    for at in (8, 9, 12, 20, 31):
        settings = {"do_sample": True, "seed": 0, "new": 25, "eos_token_id": free[at].item(), "pad_token_id": 0}
        results = []
        for model in (prepared, stock):
            tokens = generate(model, make_inputs(rows=1), **settings)
            results.append((tokens, torch.cuda.get_rng_state()))
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("at", [(8, 13), (12, 12), (17, 18)])
def test_rows_end_at_equal_or_different_steps_with_the_deferred_check(at, pair):
    prepared, stock = pair()
    settings = {"repetition_penalty": 9.0, "pad_token_id": 0}
    free = generate(stock, make_inputs(), **settings)
    ends = [row[index].item() for row, index in zip(free, at, strict=True)]
    for _ in range(2):
        assert torch.equal(
            generate(prepared, make_inputs(), eos_token_id=ends, **settings),
            generate(stock, make_inputs(), eos_token_id=ends, **settings),
        )


# PyTorch warns about its first graph.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_recorded_steps_work_together_with_graphs_of_torch_compile(pair):
    """torch.compile's graphs make PyTorch free the BLAS workspaces, so recorded steps must not depend on them."""
    prepared, _ = pair(dtype=torch.bfloat16, hidden_size=1024, intermediate_size=2816, num_attention_heads=16)
    expected = generate(prepared, make_inputs())
    layer = torch.nn.Linear(1024, 1024, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            compiled(torch.ones(8, 1024, device="cuda", dtype=torch.bfloat16))
    torch.cuda.empty_cache()
    scribbled = [torch.full((2**22,), 3e4, device="cuda") for _ in range(64)]
    replayed = counted(prepared)[1]
    assert torch.equal(generate(prepared, make_inputs()), expected)
    assert counted(prepared)[1] == replayed + 11
    del scribbled


@pytest.mark.parametrize("first", [True, False])
def test_outputs_of_a_step_survive_steps_of_other_models(first, pair):
    outlives_steps_of_others(*pair(), pair("qwen3")[0], make_inputs(), first=first)


def test_threads_on_separate_streams_equal_stock_while_another_thread_samples(pair):
    prepared, stock = pair()
    other, other_stock = pair("qwen3")
    calls = [(prepared, stock, 1), (other, other_stock, 3), (prepared, stock, 2)]
    expected = [generate(model, make_inputs(seed=seed)) for _, model, seed in calls]
    torch.cuda.synchronize()
    result, failed = [[] for _ in calls], []

    def work(index):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for rows in (2, 1, 2, 3, 2):
                    tokens = generate(calls[index][0], make_inputs(seed=calls[index][2], rows=rows))
                    if rows == 2:
                        result[index].append(tokens.cpu())
        except Exception as error:  # noqa: BLE001  shown by the test
            failed.append(error)

    caught = []

    def draw():
        try:
            for _ in range(2000):
                try:
                    torch.multinomial(torch.ones(8, device="cuda"), 2)
                except RuntimeError as error:
                    # This error is raised when a capture begins.
                    assert "Offset increment outside graph capture" in str(error)
                    caught.append(error)
        except Exception as error:  # noqa: BLE001  shown by the test
            failed.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    threads.append(threading.Thread(target=draw))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(caught) <= len(calls)
    for reference, entry in zip(expected, result, strict=True):
        assert len(entry) == 3 and all(torch.equal(reference.cpu(), tokens) for tokens in entry)


def test_kernels_in_every_stream_of_pytorchs_pool_are_not_part_of_a_recording(pair):
    """PyTorch returns the streams of its pool in turn, so a program that creates many uses all of them."""
    prepared, stock = pair()
    pool = {torch.cuda.Stream() for _ in range(64)}
    assert separate_stream(torch.device("cuda", 0)) not in pool
    added, ended = dict.fromkeys(pool, 0), threading.Event()
    sums = {stream: torch.zeros((), dtype=torch.int64, device="cuda") for stream in pool}
    torch.cuda.synchronize()

    def add():
        while not ended.is_set():
            for stream in pool:
                with torch.cuda.stream(stream):
                    sums[stream].add_(1)
                added[stream] += 1

    thread = threading.Thread(target=add)
    thread.start()
    try:
        results = [generate(prepared, make_inputs(rows=rows)).tolist() for rows in (1, 2, 3, 4)]
    finally:
        ended.set()
        thread.join()
    torch.cuda.synchronize()
    assert {stream: int(number) for stream, number in sums.items()} == added
    assert results == [generate(stock, make_inputs(rows=rows)).tolist() for rows in (1, 2, 3, 4)]
    assert counted(prepared)[0] >= 4


def test_a_step_that_waits_for_the_gpu_is_not_recorded(pair):
    prepared, stock = pair(graphs=None)

    def wait(module, args, out):
        return out * (1 + bool(out.isnan().any()))

    # A user's own hook would be refused.
    wait.__module__ = "transformers"
    handle = prepared.lm_head.register_forward_hook(wait)
    assert torch.equal(generate(prepared, make_inputs()), generate(stock, make_inputs()))
    assert "can't be recorded" in known(prepared).disabled
    torch.empty(2**30, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - 2**30, "the allocator is still in capture mode"
    handle.remove()
    hf_rocm.prepare(prepared, force=True)
    assert torch.equal(generate(prepared, make_inputs()), generate(stock, make_inputs()))
    assert counted(prepared) == (1, 11 - FIRST)


def test_memory_is_freed_with_the_model(pair):
    # This call makes the permanent allocations.
    generate(pair()[0], make_inputs())
    gc.collect()
    before = torch.cuda.memory_allocated()
    prepared, stock = pair()
    generate(prepared, make_inputs(rows=4))
    del prepared, stock
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**16


def test_peak_memory_is_that_of_stock_plus_the_static_cache(pair):
    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16}
    prepared, stock = pair(dtype=torch.bfloat16, **size)
    weights = sum(parameter.nbytes for parameter in stock.parameters())
    peaks = []
    for model in (stock, prepared):
        # The second call records the prompt, which needs more memory once.
        for _ in range(3):
            generate(model, make_inputs(length=200), new=40)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        idle = 0 if known(model) is None else known(model).pool.summary()[1]
        generate(model, make_inputs(length=200), new=40)
        peaks.append(torch.cuda.max_memory_allocated() - before + idle)
    static = known(prepared).pool.summary()[1]
    assert peaks[1] <= peaks[0] + 0.03 * weights + static


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_of_several_largest_logits_is_taken(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randint(0, 5, (2, 6, 128256), generator=generator, device="cuda").to(dtype)
    logits[0, 1, 77::1000] = float("nan")
    assert torch.equal(largest({"logits": logits}), logits.argmax(-1))
