"""A cache is passed from one stream to another with all its tensors, as far as this can be tested without a GPU."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

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

    def __init__(self, status=0):
        self.status = status
        self.created = []

    def cudaStreamCreateWithFlags(self, pointer, flags):
        self.created.append(flags.value)
        pointer._obj.value = 100 + len(self.created)
        return self.status


@pytest.fixture
def fake_streams(monkeypatch):
    """A pool of four streams, which PyTorch returns in turn."""
    turns = itertools.cycle(range(4))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: (device, next(turns)))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (device, handle))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(streams, "_STREAMS", 4)
    monkeypatch.setattr(streams, "_handed_out", [])


def test_separate_streams_are_not_from_pytorchs_pool(fake_streams, monkeypatch):
    """PyTorch's streams may belong to the program: it returns them in turn."""
    runtime = Runtime()
    monkeypatch.setattr(streams, "_runtime", lambda: runtime)
    assert [streams.separate_stream("cuda:0") for _ in range(2)] == [("cuda:0", 101), ("cuda:0", 102)]
    # cudaStreamNonBlocking
    assert runtime.created == [1, 1]


@pytest.mark.parametrize("runtime", [None, Runtime(status=2)], ids=["no library", "error"])
def test_without_the_runtime_library_separate_streams_differ(runtime, fake_streams, monkeypatch):
    monkeypatch.setattr(streams, "_runtime", lambda: runtime)
    first = streams.separate_stream("cuda:0")
    for _ in range(3):
        torch.cuda.Stream("cuda:0")
    assert [first, *(streams.separate_stream("cuda:0") for _ in range(3))] == [
        ("cuda:0", number) for number in range(4)
    ]
    assert streams.separate_stream("cuda:1") == ("cuda:1", 0)
    # All streams are in use, so this call returns one of them again.
    streams.separate_stream("cuda:0")


@pytest.mark.parametrize(("hip", "name"), [(None, "libcudart.so.13"), ("7.0", "libamdhip64.so.7")])
def test_the_runtime_is_the_one_that_the_process_has_loaded(hip, name, monkeypatch, tmp_path):
    """A second copy of the library would have its own state, so none is opened if there is not exactly one."""
    line = "7f0000000000-7f0000001000 r-xp 00000000 08:01 77                         /opt/a b/{}/{}\n"
    maps = [line.format("lib", "libc.so.6"), line.format("lib", name), line.format("lib", name)]
    monkeypatch.setattr(torch.version, "hip", hip, raising=False)
    monkeypatch.setattr(streams.ctypes, "CDLL", lambda path: path)
    monkeypatch.setattr(streams, "Path", lambda path: SimpleNamespace(read_text=lambda: "".join(maps)))
    assert streams._runtime() == f"/opt/a b/lib/{name}"
    maps.append(line.format("other", name))
    assert streams._runtime() is None
    maps[1:] = []
    assert streams._runtime() is None
