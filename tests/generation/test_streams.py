"""A cache moves from one stream to another with all its tensors, as far as this can be tested without a GPU."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.generation import pool
from hf_rocm.generation.inputs import residents_of
from hf_rocm.generation.recorded_step import RecordedStep
from hf_rocm.generation.state import known
from hf_rocm.generation.streams import tensors_in
from tests.generation.conftest import counted, generate, prompt


class Stream:
    """A stand-in for a stream. waited: the events that it waits for."""

    device = torch.device("cuda", 1)
    current: Stream


class Event:
    def __init__(self):
        self.waited = []

    def wait(self, stream):
        self.waited.append(stream)


@pytest.fixture
def handed_over(monkeypatch):
    """The tensors for which `record_stream` was called."""
    told = []
    monkeypatch.setattr(pool, "record_current_stream", lambda tensors: told.append(list(tensors)))
    other = Stream()  # streams of other devices in this thread, including the current one
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: Stream.current if device == Stream.device else other
    )
    return told


def memory(tensors):
    return {each.untyped_storage().data_ptr() for each in tensors if each.numel()}


def like(cache):
    """The key of a call that such a cache serves."""
    windows = [layer.window for layer in cache.layers]
    return {"windows": windows, "batch": cache.max_batch_size, "prompt": 1, "limit": cache.capacity - 2}


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_all_tensors_of_a_cache_are_found(kind, padded, pair):
    ours, _ = pair(kind)
    generate(ours, prompt(padded=padded), new=20)
    cache = known(ours).pool._idle[0].cache
    residents = residents_of(cache)
    held = [each for each in cache.recordings.values() if isinstance(each, RecordedStep)]
    assert held and residents is not None and counted(ours)[1] > 0
    expected = [each for layer in cache.layers for each in (layer.keys, layer.values, layer.place)]
    expected += [each for one in held for each in (*one._inputs, *one.tensors)]
    expected += [residents.input_ids, residents._clock, *residents.clocks.values()]
    for mask in residents.masks:
        expected += [mask.tensor, mask._seen, mask._places, mask.rows.key_lengths, *(mask._values or ())]
        expected += [each for each in (mask._real, mask.rows.key_starts) if each is not None]
    assert (residents._padding is not None) == bool(padded)
    expected += [each for each in (residents._padding, *residents._starts) if each is not None]
    found = memory(tensors_in(cache, residents))
    assert memory(expected) <= found
    assert not found & memory(ours.parameters())  # the traversal doesn't leave the cache


def test_a_cache_of_another_stream_is_synchronised_and_recorded(pair, handed_over):
    ours, _ = pair()
    generate(ours)
    idle = known(ours).pool._idle
    cache, here, event = idle[0].cache, Stream(), Event()
    idle[0] = pool._Idle(cache, here, event)
    sizes = like(cache)
    Stream.current = here
    assert known(ours).pool.take(**sizes) is cache and not event.waited and not handed_over
    idle.append(pool._Idle(cache, here, event))
    Stream.current = Stream()
    assert known(ours).pool.take(**sizes) is cache
    assert event.waited == [Stream.current]
    (told,) = handed_over
    assert memory(told) >= memory([cache.layers[0].keys, residents_of(cache).input_ids])


def test_a_cache_of_the_same_stream_is_preferred(pair, handed_over):
    ours, _ = pair()
    generate(ours)
    idle = known(ours).pool._idle
    cache, here = idle.pop().cache, Stream()
    generate(ours)
    other = idle.pop().cache
    idle += [pool._Idle(cache, Stream(), Event()), pool._Idle(other, here, Event())]
    Stream.current = here
    taken = known(ours).pool.take(**like(cache))
    assert taken is other and not handed_over
