"""Prompt lookup that searches on the host: stock's drafts, with one wait for the device."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator as Generator

from hf_rocm.generation import lookup
from tests.generation.conftest import alike_from_threads

WAITS = ("cpu", "nonzero", "item", "tolist", "__bool__", "__index__")


class OnDevice(torch.Tensor):
    """Stands in for tokens on a device. Collects the names of the calls for which the host would wait."""

    waits: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.waits += [name for name in WAITS if function.__name__ == name]
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) if function.__name__ == "cpu" else result


def generator(**arguments):
    return Generator(eos_token_id=torch.tensor([3, 5]), **{"max_length": 60, **arguments})


def tokens(length, seed, values=6):
    ids = torch.randint(0, values, (1, length), generator=torch.Generator().manual_seed(seed))
    return ids.as_subclass(OnDevice)


def candidates(lookup_generator, ids):
    """Returns (the candidates, the names of the calls for which the host waits)."""
    OnDevice.waits = []
    drafts, logits = lookup_generator.get_candidates(ids, **FIRST)
    waits = OnDevice.waits
    assert logits is None
    return drafts, waits


FIRST = {"is_first_iteration": False} if "is_first_iteration" in Generator.get_candidates.__annotations__ else {}


@pytest.mark.parametrize(
    "arguments", [{}, {"num_output_tokens": 3}, {"max_matching_ngram_size": 4}, {"max_length": 21}]
)
@pytest.mark.parametrize("length", [1, 2, 5, 19, 20, 40])
def test_candidates_are_those_of_stock(length, arguments):
    lookup_generator, drafted = generator(**arguments), 0
    if arguments.get("max_length", 60) <= length:
        return
    for seed in range(20):
        ids = tokens(length, seed)
        expected, waits = candidates(lookup_generator, ids)
        with lookup.searching_on_the_host():
            drafts, host_waits = candidates(lookup_generator, ids)
        assert torch.equal(drafts, expected) and drafts.dtype == expected.dtype
        assert (drafts is ids) == (expected is ids)
        assert host_waits == ["cpu"] and (length < 2 or length + 1 == lookup_generator.max_length or len(waits) > 1)
        drafted += drafts is not ids
    assert drafted or length < 5 or length + 1 == lookup_generator.max_length


def test_without_a_match_the_tokens_are_returned():
    ids = torch.arange(20)[None].as_subclass(OnDevice)
    with lookup.searching_on_the_host():
        assert generator().get_candidates(ids, **FIRST)[0] is ids


def test_end_tokens_are_copied_once():
    lookup_generator = Generator(eos_token_id=torch.tensor([3]).as_subclass(OnDevice), max_length=60)
    with lookup.searching_on_the_host():
        waits = [candidates(lookup_generator, tokens(30, seed))[1] for seed in range(3)]
    assert waits == [["cpu", "cpu"], ["cpu"], ["cpu"]]


def test_outside_the_block_and_in_other_threads_stocks_search_runs():
    lookup_generator = generator()
    stock = Generator.get_candidates
    with lookup.searching_on_the_host():
        assert Generator.get_candidates is not stock
        assert alike_from_threads(
            lambda ids: torch.tensor(len(candidates(lookup_generator, ids)[1]) > 1),
            [tokens(30, 0)],
            [torch.tensor(True)],
        )
    assert Generator.get_candidates is stock
    assert len(candidates(lookup_generator, tokens(30, 0))[1]) > 1


def test_processors_get_the_arguments_of_stock():
    if "logits_processor" not in vars(generator()):
        pytest.skip("this release does not call processors for drafts")
    received = []

    def processor(ids, scores):
        received.append(type(ids))
        return scores

    class Processors(list):
        def __call__(self, ids, scores):
            return processor(ids, scores)

    with lookup.searching_on_the_host():
        generator(logits_processor=Processors([processor]), vocab_size=6).get_candidates(tokens(30, 0), **FIRST)
        assert received and set(received) == {OnDevice}
        received.clear()
        generator(logits_processor=Processors(), vocab_size=6).get_candidates(tokens(30, 0), **FIRST)
        assert received == []


def test_a_replaced_search_is_kept(monkeypatch):
    monkeypatch.setattr(Generator, "get_candidates", lambda self, ids, **_: (ids, type(ids)))
    with lookup.searching_on_the_host():
        ids = tokens(30, 0)
        assert generator().get_candidates(ids) == (ids, OnDevice)
