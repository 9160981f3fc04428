"""The next step of prompt lookup is launched before the loop has prepared it; wrong launches never change a token."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import MaxTimeCriteria, StoppingCriteriaList

from hf_rocm.errors import GraphError
from hf_rocm.generation import cache_layer, lookahead, seen, verification
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.draft_search import Search
from hf_rocm.generation.host_tokens import HostTokens
from hf_rocm.generation.hybrid import HybridDecodeCache
from hf_rocm.generation.lookahead import Lookahead
from hf_rocm.generation.residents import Source
from hf_rocm.generation.runner import Runner
from hf_rocm.generation.state import State, known
from tests.generation.conftest import Streamer, assistant_of, counted, generate
from tests.generation.test_lookup import OnDevice
from tests.generation.test_speculation import KINDS, NEVER, NEW, before, equals_greedy, looked_up, repeating


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_launched_steps_are_those_of_the_loop(kind, tokens, pair, launched, monkeypatch):
    # No step is launched early if a window must move before it.
    monkeypatch.setattr(cache_layer, "SLACK", 30)
    prepared, stock = pair(kind)
    for seed in (0, 1, 0, 1, 2, 3, 2):
        inputs = repeating(seed, padded=3 * (seed % 2))
        with torch.inference_mode(seed == 1):
            assert equals_greedy(looked_up(prepared, inputs, tokens=tokens), stock, inputs)
    unused = [step for step in launched if not step.served]
    # Steps that are launched at the end of a call are not used.
    assert len(launched) - len(unused) > 8 and len(unused) <= 14


@pytest.mark.parametrize("queued_early", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_end_tokens_and_maximum_lengths_end_calls_as_in_stock(kind, queued_early, pair, launched, queued, monkeypatch):
    monkeypatch.setattr(cache_layer, "SLACK", 30)
    if not queued_early:
        monkeypatch.setattr(Lookahead, "_saves_time", lambda self, times: False)
    prepared, stock = pair(kind)
    if kind == "gemma3" and before("5.14"):
        pytest.skip("stock's own cache can't remove drafts beyond a sliding window")
    new = looked_up(stock, repeating(1))[0, -NEW:].tolist()
    for end in dict.fromkeys(new[8:]):
        results = [looked_up(model, repeating(1), eos_token_id=[end, NEVER]) for model in (prepared, stock)]
        assert torch.equal(*results)
    for length in range(1, 24):
        assert torch.equal(*(looked_up(model, repeating(1), new=length) for model in (prepared, stock)))
    assert len(launched) > 10


def test_wrong_launches_change_no_token(pair, launched, monkeypatch):
    """A launched step may have other tokens, fewer tokens or a later position than the step of the loop."""
    prepared, stock = pair()
    monkeypatch.setattr(Lookahead, "_saves_time", lambda self, times: False)
    rng = random.Random(0)
    expected_step = Lookahead._next

    def another(self, accepted, selected):
        following = expected_step(self, accepted, selected)
        if following is None:
            return None
        position, ids, _ = following
        kind = rng.choice(("right", "tokens", "number", "position", "all"))
        if kind in ("tokens", "all"):
            ids = [rng.randrange(61) for _ in ids]
        if kind in ("number", "all"):
            ids = ids[: rng.randint(1, len(ids))]
        if kind in ("position", "all"):
            position += rng.randint(1, 3)
        return position, ids, Source(torch.tensor([ids]), None, 0, 1)

    def searching_again(self, *arguments, stock=Lookahead.launch):
        stock(self, *arguments)
        if self.launched is not None:
            self.launched.accepted = []

    expected = {seed: looked_up(stock, repeating(seed)) for seed in range(3)}
    looked_up(prepared, repeating())
    monkeypatch.setattr(Lookahead, "launch", searching_again)
    monkeypatch.setattr(Lookahead, "_next", another)
    for number in range(30):
        assert torch.equal(looked_up(prepared, repeating(number % 3)), expected[number % 3])
    assert 20 < sum(step.served for step in launched) < len(launched) - 20 and known(prepared).disabled is None


def test_a_launch_that_overwrites_earlier_tokens_raises(pair, monkeypatch):
    prepared, _ = pair()
    looked_up(prepared, repeating())
    expected_step = Lookahead._next

    def earlier(self, accepted, selected):
        following = expected_step(self, accepted, selected)
        return following and (following[0] - 1, *following[1:])

    monkeypatch.setattr(Lookahead, "_next", earlier)
    with pytest.raises(GraphError, match="has overwritten keys"):
        for seed in range(3):
            looked_up(prepared, repeating(seed))


def test_steps_that_are_not_replayed_discard_the_launch(pair, launched, monkeypatch):
    """A hook is registered after a step was launched, so the loop's step runs uncaptured."""
    prepared, stock = pair(graphs=None)
    looked_up(prepared, repeating())
    launch, hooked = Runner.launch, []

    def launching(self, position, tokens, source):
        result = launch(self, position, tokens, source)
        if result is not None and not hooked:
            hooked.append(prepared.lm_head.register_forward_hook(lambda *_: None))
        return result

    monkeypatch.setattr(Runner, "launch", launching)
    before_hook = counted(prepared)[1]
    assert torch.equal(*(looked_up(model, repeating(1)) for model in (prepared, stock)))
    hooked[0].remove()
    assert launched and counted(prepared)[1] - before_hook < 8
    assert torch.equal(*(looked_up(model, repeating(2)) for model in (prepared, stock)))


class TransformersStreamer(Streamer):
    """A streamer whose class appears to belong to transformers."""

    __module__ = "transformers.generation.streamers"


def test_no_step_is_launched_early_if_its_replay_will_be_compared(pair, launched, queued, monkeypatch):
    """Otherwise a replay that writes to other rows of the cache would have written to them before the comparison."""
    prepared, stock = pair()
    compare, early = Runner._compare, []

    def comparing(self, step, *arguments):
        early.append(bool(launched) and launched[-1].position == self.cache.length)
        return compare(self, step, *arguments)

    monkeypatch.setattr(Runner, "_compare", comparing)
    for seed in (0, 1, 2, 3) * 2:
        launched.clear()
        assert torch.equal(*(looked_up(model, repeating(seed)) for model in (prepared, stock)))
    assert len(early) > 10 and not any(early) and queued


def test_steps_are_launched_early_with_streamers_of_transformers_but_not_with_others(pair, launched):
    prepared, stock = pair()
    for kind in (TransformersStreamer, Streamer):
        for seed in (0, 0, 1):
            streamers = kind(), kind()
            tokens = looked_up(prepared, repeating(seed), streamer=streamers[0])
            assert torch.equal(tokens, looked_up(stock, repeating(seed), streamer=streamers[1]))
            received = [streamer.values for streamer in streamers]
            if kind is TransformersStreamer:
                # Steps that verify no drafts pass their tokens one by one.
                received = [[token for (row,) in values[:-1] for token in row] for values in received]
            assert received[0] == received[1]
        assert (len(launched) > 4) == (kind is TransformersStreamer)
        launched.clear()


def test_calls_with_user_code_sampling_a_processor_or_an_assistant_launch_no_step(pair, launched):
    prepared, stock = pair()
    calls = [
        {"stopping_criteria": [lambda ids, scores, **_: torch.zeros(1, dtype=torch.bool)]},
        {"streamer": Streamer()},
        {"do_sample": True},
        {"repetition_penalty": 1.1},
        {"prompt_lookup_num_tokens": None, "assistant_model": assistant_of(stock, "constant")},
    ]
    for arguments in calls:
        for _ in range(2):
            looked_up(prepared, repeating(), **arguments)
    assert not launched and counted(prepared)[1] > 20


def test_criteria_of_transformers_do_not_prevent_early_launches(pair, launched):
    prepared, stock = pair()
    for seed in (0, 0, 1):
        criteria = StoppingCriteriaList([MaxTimeCriteria(600.0)])
        results = [looked_up(model, repeating(seed), stopping_criteria=criteria) for model in (prepared, stock)]
        assert torch.equal(*results)
    # Before 5.14, the criteria also receive the drafts.
    assert len(launched) > 4 or before("5.14")


def test_the_logits_of_the_last_step_are_kept(pair, monkeypatch):
    """A stand-in that is read after the launch returns the logits of its own step."""
    prepared, _ = pair()
    looked_up(prepared, repeating())
    select, seen = verification.Verification.select, []

    def selecting(self, step, runner):
        logits = step.logits.clone()
        result = select(self, step, runner)
        if self.lookahead.launched is not None:
            seen.append(torch.equal(step.logits, logits))
            assert torch.equal(self.logits_of(step), logits) and torch.equal(logits.argmax(-1), result[0])
        return result

    monkeypatch.setattr(verification.Verification, "select", selecting)
    looked_up(prepared, repeating(1))
    # The launched step wrote to the same tensor.
    assert not all(seen)


def test_a_second_argmax_of_a_step_returns_the_same_tokens(pair, monkeypatch):
    """The launched step may already have written to the tensors of the last one."""
    prepared, stock = pair()
    looked_up(prepared, repeating())
    argmax, counts = verification._Scores.argmax, []

    def twice(self, *args, **kwargs):
        first = argmax(self, *args, **kwargs)
        # This is a copy if a later replay overwrites the logits, and otherwise None.
        before = self._choice.lookahead.logits
        again = argmax(self, *args, **kwargs)
        assert torch.equal(first.tensor(), again if before is not None else again.tensor())
        counts.append(before is not None)
        return first

    monkeypatch.setattr(verification._Scores, "argmax", twice)
    assert torch.equal(*(looked_up(model, repeating(1)) for model in (prepared, stock)))
    assert sum(counts) > 4


def test_a_step_that_transformers_prepares_launches_no_step():
    """The tokens of an earlier step, which ran uncaptured, are not used for this one."""
    tokens, ids = HostTokens(), torch.tensor([[5, 6, 7, 8, 5, 6]])
    ahead = Lookahead(tokens, early=True)
    candidates = ahead.candidates(ids, Search(3, 2, 60, frozenset()))
    assert not ahead.prepares(5, candidates) and ahead.take(5) is None and ahead.expects()
    ahead.candidates(ids, Search(3, 2, 60, frozenset()))
    assert ahead.take(6) is None and not ahead.expects()


@pytest.mark.skipif(before("5.14"), reason="no step is launched if criteria receive the drafts")
def test_a_call_that_ends_after_a_launch_overwrote_earlier_tokens_raises(pair, monkeypatch):
    prepared, _ = pair()
    looked_up(prepared, repeating())
    criterion = MaxTimeCriteria(600.0)
    expected_step, launch = Lookahead._next, Lookahead.launch

    def earlier(self, accepted, selected):
        following = expected_step(self, accepted, selected)
        return following and (following[0] - 1, *following[1:])

    def launching(self, *arguments):
        launch(self, *arguments)
        if self.launched is not None:
            # The loop ends before it calls the launched step.
            criterion.max_time = -1.0

    monkeypatch.setattr(Lookahead, "_next", earlier)
    monkeypatch.setattr(Lookahead, "launch", launching)
    criteria = StoppingCriteriaList([criterion])
    with pytest.raises(GraphError, match="has overwritten keys"):
        for seed in range(3):
            looked_up(prepared, repeating(seed), stopping_criteria=criteria, return_dict_in_generate=True)


def test_the_capacity_is_sufficient_after_a_whole_step_was_removed():
    """The capacity is also sufficient if a step runs again at the same position."""
    cache = DecodeCache([None], capacity=cache_layer.LEAST, limit=cache_layer.LEAST)
    cache.drafts = 3
    cache.update(*torch.ones(2, 1, 1, 5, 4), 0)
    while cache.length < 2 * cache_layer.LEAST:
        for again in (True, False):
            cache.aim(3)
            assert cache.length + 3 <= cache.capacity
            cache.update(*torch.ones(2, 1, 1, 3, 4), 0)
            if again:
                cache.crop(cache.length - 3)
    assert cache.layers[0].keys[:, :, : cache.length].eq(1).all()


def test_the_number_of_keys_of_steps_is_limited(monkeypatch):
    monkeypatch.setattr(seen, "_MAX_KEYS", 3)
    keys = seen.Seen()
    for state in range(5):
        assert not keys.check_and_record((state, "key")) and keys.check_and_record((state, "key"))
        keys.record_replay(state, 2, (state, "key"))
    assert [keys.key_of(state, 2) for state in range(5)] == [None, None, (2, "key"), (3, "key"), (4, "key")]
    assert not keys.check_and_record((0, "key")) and keys.key_of(4, 3) is None


def test_numbers_of_a_models_states_are_not_reused():
    """A cache in use keeps its recordings, whose keys contain these numbers, when the state starts over."""
    state = State("Model", required=False)
    before = [state.number_of(fingerprint) for fingerprint in "abc"]
    state.start_over()
    assert not {state.number_of(fingerprint) for fingerprint in "cba"} & {*before}


def test_nothing_is_left_after_a_call(pair):
    prepared, stock = pair()
    for seed in range(3):
        looked_up(prepared, repeating(seed))
        cache = known(prepared).pool._idle[-1].cache
        assert cache.choice is None
        assert torch.equal(generate(prepared, repeating(seed), new=NEW), generate(stock, repeating(seed), new=NEW))


def test_returned_caches_have_only_the_tokens_of_the_call(pair, launched):
    prepared, stock = pair()
    for seed in (0, 0, 1):
        results = [looked_up(model, repeating(seed), return_dict_in_generate=True) for model in (prepared, stock)]
        assert torch.equal(results[0].sequences, results[1].sequences)
        lengths = [result.past_key_values.get_seq_length() for result in results]
        assert lengths[0] == lengths[1]
    assert len(launched) > 4


def test_drafts_of_a_launched_step_are_not_searched_again():
    class Counting(Search):
        searches = 0

        def drafts(self, tokens):
            Counting.searches += 1
            return super().drafts(tokens)

    search, tokens = Counting(3, 2, 60, frozenset()), HostTokens()
    ids = torch.tensor([[5, 6, 7, 8, 5, 6]])
    ahead = Lookahead(tokens, early=True)
    assert not ahead.expects()
    candidates = ahead.candidates(ids, search)
    assert candidates.tolist() == [[5, 6, 7, 8, 5, 6, 7, 8, 5]]
    steps = []

    def launch(position, count, source):
        row = torch.cat((source.ids, source.extra_ids), dim=1)[0]
        step = [*row[source.first :][:1].tolist(), *row[source.drafts :][: count - 1].tolist()]
        steps.append((position, step))
        return "step", torch.tensor([step])

    assert not ahead.prepares(5, candidates) and not ahead.expects()
    assert ahead.take(5) is None and ahead.expects()
    ahead.launch(*[torch.tensor([[7, 9, 1, 2]])] * 2, torch.empty(0), SimpleNamespace(launch=launch))
    # The token 9 is new.
    assert steps == [(7, [9])] and not ahead.expects()
    assert not ahead.prepares(5, candidates) and ahead.take(6) is None
    ahead.launch(*[torch.tensor([[7, 8, 6, 2]])] * 2, torch.empty(0), SimpleNamespace(launch=launch))
    assert steps[1] == (8, [6, 7, 8, 5])
    after = torch.cat((ids, torch.tensor([[7, 8, 6]])), dim=1)
    tokens.append(torch.tensor([[7, 8, 6]]), before=ids, after=after)
    assert Counting.searches == 3
    candidates = ahead.candidates(after, search)
    assert candidates[0, 9:].tolist() == [7, 8, 5] and Counting.searches == 3
    assert not ahead.prepares(7, candidates) and not ahead.prepares(8, candidates.clone())
    ahead.candidates(after, search._replace(most=2))
    # Other settings require a new search.
    assert Counting.searches == 4
    other = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 5, 6]])
    assert ahead.candidates(other, search)[0, 9:].tolist() == [7, 8, 5] and Counting.searches == 5
    ahead.candidates(after, search)
    assert ahead.prepares(8, ahead.candidates(after, search)) and ahead.take(8) == "step" and ahead.launched is None


def test_end_tokens_are_copied_to_the_host_once():
    tokens = torch.tensor([[4, 5, 6]])
    accepted = verification._Selected(tokens, tokens, HostTokens())[:, :3]
    ends = torch.tensor([5, 9]).as_subclass(OnDevice)
    OnDevice.waits = []
    for _ in range(2):
        is_end = torch.isin(accepted.squeeze(0), ends)
        assert type(is_end) is torch.Tensor and is_end.tolist() == [False, True, False]
    assert OnDevice.waits == ["cpu"] and accepted.device == tokens.device
    ends += 1
    assert torch.isin(accepted.squeeze(0), ends).tolist() == [False, False, True]
    assert torch.isin(accepted.squeeze(0), tokens[0], invert=True).tolist() == [False] * 3


def test_reasons_against_early_launches():
    config = SimpleNamespace(prompt_lookup_num_tokens=3)
    arguments = {"generation_config": config, "past_key_values": HybridDecodeCache([None], capacity=1, limit=1)}
    assert "states" in lookahead.refuses(arguments, None)
    arguments["past_key_values"] = DecodeCache([None], capacity=1, limit=1)
    assert lookahead.refuses(arguments, None) is None and "Mine may change" in lookahead.refuses(arguments, "Mine")
    config.prompt_lookup_num_tokens = None
    assert "assistant" in lookahead.refuses(arguments, None)
