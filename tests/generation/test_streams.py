"""A cache is passed from one stream to another with all its tensors, as far as this can be tested without a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_rocm.generation import pool, streams
from hf_rocm.generation.inputs import all_residents_of
from hf_rocm.generation.recorded_step import RecordedStep
from hf_rocm.generation.state import known
from hf_rocm.generation.streams import tensors_in
from tests.generation.conftest import counted, generate, prompt


class Stream:
    """A stand-in for a stream on one device. current: the current stream of that device."""

    device = torch.device("cuda", 1)
    current: Stream


class Event:
    def __init__(self):
        self.waited = []

    def wait(self, stream):
        self.waited.append(stream)


@pytest.fixture
def recorded_on_stream(monkeypatch):
    """The arguments of every call to `record_current_stream`, as lists of tensors."""
    calls = []
    monkeypatch.setattr(pool, "record_current_stream", lambda tensors: calls.append(list(tensors)))
    # The stream of every other device, including the current device.
    other = Stream()
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: Stream.current if device == Stream.device else other
    )
    return calls


def storage_addresses(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def take_arguments(cache):
    """The arguments of `pool.take` for a call that this cache can serve."""
    windows = [layer.window for layer in cache.layers]
    return {"windows": windows, "batch": cache.max_batch_size, "prompt": 1, "limit": cache.capacity - 2}


@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 3, "eos_token_id": 61}])
@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_all_tensors_of_a_cache_are_collected(kind, padded, drafts, pair):
    prepared, _ = pair(kind)
    generate(prepared, prompt(rows=1, padded=padded), new=40, **drafts)
    cache = known(prepared).pool._idle[0].cache
    everything = all_residents_of(cache)
    assert len(everything) == 1 or (drafts and len({residents.form.tokens for residents in everything}) > 1)
    recordings = [recording for recording in cache.recordings.values() if isinstance(recording, RecordedStep)]
    assert recordings and everything and counted(prepared)[1] > 0
    expected = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values, layer.place)]
    expected += [tensor for step in recordings for tensor in (*step._inputs, *step.tensors)]
    for residents in everything:
        expected += [residents.input_ids, residents._clock, residents._relative, *residents.clocks.values()]
        for mask in residents.masks:
            expected += [mask.tensor, mask.written, mask.rows.key_lengths]
            expected += [] if mask.rows.key_starts is None else [mask.rows.key_starts]
        assert (residents._padding is not None) == bool(padded)
        expected += [start for start in (residents._padding, *residents._starts) if start is not None]
    result = storage_addresses(tensors_in(cache, everything))
    assert storage_addresses(expected) <= result
    # The traversal doesn't leave the cache.
    assert not result & storage_addresses(prepared.parameters())


def test_a_cache_of_another_stream_is_synchronised_and_recorded(pair, recorded_on_stream):
    prepared, _ = pair()
    generate(prepared)
    idle = known(prepared).pool._idle
    cache, stream, event = idle[0].cache, Stream(), Event()
    idle[0] = pool._Idle(cache, stream, event)
    sizes = take_arguments(cache)
    Stream.current = stream
    assert known(prepared).pool.take(**sizes) is cache and not event.waited and not recorded_on_stream
    idle.append(pool._Idle(cache, stream, event))
    Stream.current = Stream()
    assert known(prepared).pool.take(**sizes) is cache
    assert event.waited == [Stream.current]
    (tensors,) = recorded_on_stream
    assert storage_addresses(tensors) >= storage_addresses([cache.layers[0].keys, all_residents_of(cache)[0].input_ids])


def test_a_cache_of_the_same_stream_is_preferred(pair, recorded_on_stream):
    prepared, _ = pair()
    generate(prepared)
    idle = known(prepared).pool._idle
    cache, stream = idle.pop().cache, Stream()
    generate(prepared)
    other = idle.pop().cache
    idle += [pool._Idle(cache, Stream(), Event()), pool._Idle(other, stream, Event())]
    Stream.current = stream
    taken = known(prepared).pool.take(**take_arguments(cache))
    assert taken is other and not recorded_on_stream


class Runtime:
    """A runtime library that creates streams with consecutive numbers, unless `status` is the code of an error."""

    def __init__(self, prefix, status=0):
        self.status = status
        self.calls = []
        setattr(self, f"{prefix}StreamCreateWithFlags", self.create)
        setattr(self, f"{prefix}GetLastError", lambda: self.calls.append("last error"))

    def create(self, pointer, flags):
        self.calls.append((Device.current, flags.value))
        pointer._obj.value = 100 + len(self.calls)
        return self.status


class Device:
    """The current device within a block."""

    current = None

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        Device.current = self.device

    def __exit__(self, *_):
        Device.current = None


@pytest.fixture(params=[(None, "cuda"), ("7.0", "hip")], ids=["cuda", "hip"])
def prefix(request, monkeypatch):
    """PyTorch has a pool of four streams, which it returns in turn. Returns the prefix of the runtime's functions."""
    turns = itertools.cycle(range(4))
    hip, prefix = request.param
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: (device, next(turns)))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (device, handle))
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(streams, "_STREAMS", 4)
    monkeypatch.setattr(streams, "_handed_out", [])
    return prefix


def test_separate_streams_are_not_from_pytorchs_pool(prefix, monkeypatch):
    """PyTorch returns the streams of its pool in turn, so the program may use any of them, too."""
    runtime = Runtime(prefix)
    monkeypatch.setattr(streams, "_runtime", lambda: runtime)
    assert [streams.separate_stream(f"cuda:{index}") for index in range(2)] == [("cuda:0", 101), ("cuda:1", 102)]
    # The flag is cudaStreamNonBlocking.
    assert runtime.calls == [("cuda:0", 1), ("cuda:1", 1)]


@pytest.mark.parametrize("status", [None, 2], ids=["no function", "error"])
def test_without_the_runtimes_function_separate_streams_differ(status, prefix, monkeypatch):
    runtime = None if status is None else Runtime(prefix, status)
    monkeypatch.setattr(streams, "_runtime", lambda: runtime)
    first = streams.separate_stream("cuda:0")
    # PyTorch would report the error at its next kernel launch.
    assert runtime is None or runtime.calls == [("cuda:0", 1), "last error"]
    for _ in range(3):
        torch.cuda.Stream("cuda:0")
    assert [first, *(streams.separate_stream("cuda:0") for _ in range(3))] == [
        ("cuda:0", number) for number in range(4)
    ]
    assert streams.separate_stream("cuda:1") == ("cuda:1", 0)
    # All streams are in use, so this call returns one of them again.
    streams.separate_stream("cuda:0")


def test_functions_are_looked_up_in_the_libraries_of_pytorch(monkeypatch):
    # libtorch_cpu, to which the extension module is not linked directly, is linked to an OpenMP library.
    assert streams._runtime().omp_get_max_threads() >= 1
    assert not hasattr(streams._runtime(), "no_such_function")
    monkeypatch.setattr(torch._C, "__file__", "/nowhere/_C.so")
    assert streams._runtime() is None
    monkeypatch.delattr(torch._C, "__file__")
    assert streams._runtime() is None
