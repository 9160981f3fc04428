"""Drafts are compared on the host with the tokens of recorded steps, and the results equal stock's tokens."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from transformers import EosTokenCriteria, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import utils

import hf_rocm
from hf_rocm.generation import recorder, stop_criteria, verification
from hf_rocm.generation.host_tokens import HostTokens
from hf_rocm.generation.state import known
from tests.generation import faults
from tests.generation.conftest import Streamer, assistant_of, counted, generate
from tests.generation.test_speculation import NEVER, NEW, before, equals_greedy, looked_up, repeating


@pytest.fixture
def read(monkeypatch):
    """Count the steps whose tokens were read on the host, and how often a stand-in computed its logits or scores."""
    counts = Counter()
    for kind, name, value in (
        (verification._Selected, "__init__", "tokens"),
        (verification._Logits, "tensor", "logits"),
        (verification._Scores, "tensor", "logits"),
    ):
        method = getattr(kind, name)

        def counting(self, *args, method=method, value=value):
            counts[value] += 1
            return method(self, *args)

        monkeypatch.setattr(kind, name, counting)
    return counts


@pytest.mark.parametrize("ends", [NEVER, [5, 17, 40]])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_lookups_read_only_tokens(kind, ends, pair, read):
    prepared, stock = pair(kind)
    for seed in range(3):
        inputs = repeating(seed)
        tokens = looked_up(prepared, inputs, eos_token_id=ends)
        if ends == NEVER:
            assert equals_greedy(tokens, stock, inputs)
        elif not before("5.14"):
            assert torch.equal(tokens, generate(stock, inputs, new=NEW, eos_token_id=ends))
    replayed = counted(prepared)[1] - known(prepared).compared
    assert read["tokens"] == replayed > 4 and read["logits"] == 0


def test_calls_with_an_assistant_read_only_tokens(pair, read):
    prepared, stock = pair()
    for _ in range(2):
        assistant = hf_rocm.prepare(assistant_of(stock, "constant"), force=True, graphs=True)
        streamers = Streamer(), Streamer()
        tokens = generate(
            prepared, repeating(), new=NEW, eos_token_id=NEVER, assistant_model=assistant, streamer=streamers[0]
        )
        expected = generate(
            stock,
            repeating(),
            new=NEW,
            eos_token_id=NEVER,
            assistant_model=assistant_of(stock, "constant"),
            streamer=streamers[1],
        )
        assert torch.equal(tokens, expected) and streamers[0].values == streamers[1].values
    assert read["tokens"] == counted(prepared)[1] - known(prepared).compared > 4 and read["logits"] == 0


@pytest.fixture
def searched(monkeypatch):
    """Compare the tokens of every search with those on the device. Returns a list: whether each search copied them."""
    copies = []
    of = HostTokens.of

    def checked(self, input_ids):
        copies.append(not self.has(input_ids))
        tokens = of(self, input_ids)
        assert tokens.tolist() == input_ids[0].tolist()
        return tokens

    monkeypatch.setattr(HostTokens, "of", checked)
    return copies


@pytest.mark.parametrize("ends", [NEVER, [5, 17, 40]])
def test_tokens_and_end_tokens_are_available_on_the_host(ends, pair, searched, monkeypatch):
    prepared, stock = pair()
    continued = []
    goes_on = stop_criteria._Criteria._goes_on
    monkeypatch.setattr(
        stop_criteria._Criteria, "_goes_on", lambda *args: continued.append(goes_on(*args)) or continued[-1]
    )
    for seed in (0, 0, 1, 2, 3):
        expected = generate(stock, repeating(seed), new=NEW, eos_token_id=ends)
        tokens = looked_up(prepared, repeating(seed), eos_token_id=ends)
        assert torch.equal(tokens[:, : expected.shape[1]], expected)
    assert len(searched) - sum(searched) > 12 and sum(continued) > 12


def test_a_criterion_of_the_user_may_change_the_tokens(pair, searched):
    def changes(input_ids, scores, **_):
        input_ids[0, -1] = 7 + input_ids.shape[1] % 3
        return torch.zeros(1, dtype=torch.bool)

    prepared, stock = pair()
    for seed in range(3):
        results = [looked_up(model, repeating(seed), stopping_criteria=[changes]) for model in (prepared, stock)]
        assert torch.equal(*results)
    assert all(searched) and counted(prepared)[1] > 8


def test_a_streamer_may_change_the_values_that_it_receives(pair, searched):
    class Changes(Streamer):
        def put(self, value):
            # On a CPU, the first value is the prompt itself.
            if self.values:
                value.fill_(1)
            self.values.append(value.shape)

    prepared, stock = pair()
    for seed in (0, 0, 1):
        tokens = looked_up(prepared, repeating(seed), streamer=Changes())
        assert equals_greedy(tokens, stock, repeating(seed))
    assert not all(searched)


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True},
        {"repetition_penalty": 1.1},
        {"return_dict_in_generate": True, "output_scores": True},
        {"return_dict_in_generate": True, "output_logits": True},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_calls_that_read_logits_equal_stock(settings, pair, read):
    prepared, stock = pair()
    for _ in range(2):
        results = [looked_up(model, repeating(), **settings) for model in (prepared, stock)]
        assert torch.equal(*(getattr(result, "sequences", result) for result in results))
    assert counted(prepared)[1] > 8 and read["tokens"] == 0


def test_replaced_functions_receive_tensors(pair, read, monkeypatch):
    prepared, stock = pair(graphs=None)
    looked_up(prepared, repeating())
    before_replacing = read["tokens"]
    monkeypatch.setattr(torch, "cat", lambda *args, stock=torch.cat, **kwargs: stock(*args, **kwargs))
    assert equals_greedy(looked_up(prepared, repeating()), stock, repeating())
    assert read["tokens"] == before_replacing > 0
    assert not verification.Verification(LogitsProcessorList()).holds()


def test_a_model_with_its_own_update_receives_tensors(pair, read):
    prepared, _ = pair()
    stock_update = GenerationMixin._update_model_kwargs_for_generation
    prepared._update_model_kwargs_for_generation = lambda *args, **kwargs: stock_update(prepared, *args, **kwargs)
    looked_up(prepared, repeating())
    assert read["tokens"] == 0


def test_wrong_tokens_are_detected(pair, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path))
    monkeypatch.setitem(recorder.factories, "cpu", faults.recorder_with(faults.argmax_dropped, first=2, last=2))
    prepared, stock = pair(graphs=None)
    for _ in range(2):
        assert equals_greedy(looked_up(prepared, repeating()), stock, repeating())
    assert "differed from the step itself" in known(prepared).disabled


def test_any_other_use_of_a_stand_in_computes_the_tensor():
    logits = torch.randn((1, 4, 61), generator=torch.Generator().manual_seed(0)).bfloat16()
    step = SimpleNamespace(logits=logits, tokens=logits.argmax(-1))
    stand_in = verification.Verification(LogitsProcessorList()).stand_in(step, lambda: None)
    assert torch.equal(stand_in[:, -3:], logits[:, -3:]) and stand_in.shape == (1, 4, 61)
    scores = stand_in[:, -4:].to(dtype=torch.float32, device=logits.device)
    assert torch.equal(scores.clone().softmax(-1), logits.float().softmax(-1))
    assert torch.equal(torch.cat([scores, scores]), torch.cat([logits.float()] * 2))
    assert torch.equal(scores.to(torch.float64), logits.float().double())
    assert torch.equal(scores == 0, logits.float() == 0) and torch.equal(scores != 0, logits.float() != 0)
    assert torch.equal(scores.argmax(-1), step.tokens) and torch.equal(scores[:, 1, :], logits.float()[:, 1])
    selected = scores.argmax(dim=-1)
    assert torch.equal(selected + 1, step.tokens + 1) and torch.equal(selected[0], step.tokens[0])
    drafts = step.tokens[:, :3].clone()
    drafts[0, 1] += 1
    assert (drafts == selected[:, :-1]).tolist() == [[True, False, True]]
    assert torch.equal(selected[:, :-1] + 1, step.tokens[:, :-1] + 1)
    accepted = selected[:, : torch.tensor(1) + 1]
    assert accepted.shape == (1, 2) and torch.equal(torch.cat((drafts, accepted), -1)[:, 3:], step.tokens[:, :2])
    assert torch.equal(accepted[:, :1].cpu(), step.tokens[:, :1]) and torch.equal(
        accepted.sum(), step.tokens[:, :2].sum()
    )
    assert torch.equal(accepted.squeeze(0), step.tokens[0, :2])


def test_the_result_of_criteria_that_stop_nothing():
    tokens = HostTokens()
    ids = torch.tensor([[4, 5, 6]])
    criteria = stop_criteria.replacement(
        {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(torch.tensor([6, 9]))])}, tokens
    )["stopping_criteria"]
    rows = torch.ones(1, dtype=torch.long)
    # The host has no copy of the tokens yet.
    assert criteria(ids, None).tolist() == [True]
    assert tokens.of(ids).tolist() == [4, 5, 6] and criteria(ids, None).tolist() == [True]
    ids = torch.tensor([[4, 5, 7]])
    tokens = criteria._tokens = HostTokens()
    tokens.of(ids)
    done = criteria(ids, None)
    assert not done and bool(~done) and torch.equal(done | torch.tensor([True]), torch.tensor([True]))
    unfinished = rows & ~done
    finished = unfinished.max() == 0
    assert finished is False and torch.equal(unfinished + 1, rows + 1) and (unfinished & ~done).max() != 0
    assert torch.equal(unfinished & torch.tensor([False]), torch.tensor([0])) and unfinished.max() == 1
    assert torch.equal(torch.ones(2, dtype=torch.long) & ~done, torch.ones(2, dtype=torch.long))
    candidates = torch.tensor([[4, 5, 7, 3, 9]])
    tokens.draft(candidates[0, 3:].tolist(), candidates)
    assert criteria(candidates, None).tolist() == [True]
    candidates = torch.tensor([[4, 5, 7, 9, 3]])
    tokens.draft(candidates[0, 3:].tolist(), candidates)
    assert not criteria(candidates, None)


def test_end_tokens_after_uncaptured_steps_end_calls_as_in_stock(pair):
    prepared, stock = pair()
    # with these seeds, an uncaptured step accepts as many tokens as there are drafts, and the last one is an EOS token
    for seed in (1, 2):
        new = looked_up(stock, repeating(seed))[0, repeating(seed)["input_ids"].shape[1] :]
        for end in dict.fromkeys(new.tolist()):
            results = [looked_up(model, repeating(seed), eos_token_id=end) for model in (prepared, stock)]
            assert torch.equal(*results)


def test_tokens_of_other_tensors_are_copied():
    ids, other = torch.tensor([[4, 5, 6]]), torch.tensor([[7, 8, 9]])
    tokens = HostTokens()
    assert tokens.of(ids).tolist() == [4, 5, 6] and tokens.last(ids) == 6 and tokens.last(other) is None
    assert tokens.of(other).tolist() == [7, 8, 9] and tokens.last(ids) is None
    after = torch.cat((ids, other), dim=1)
    tokens.append(other, before=ids, after=after)
    assert tokens.last(after) is None and tokens.of(after).tolist() == [4, 5, 6, 7, 8, 9]
    longer = torch.cat((after, ids), dim=1)
    tokens.append(ids, before=after, after=longer)
    assert tokens.has(longer) and tokens.of(longer).tolist() == [4, 5, 6, 7, 8, 9, 4, 5, 6]
    longer[0, -1] = 1
    assert tokens.last(longer) is None and tokens.of(longer).tolist()[-1] == 1
    candidates = torch.cat((ids, other), dim=1)
    tokens.draft([7, 8, 9], candidates)
    # This change shows whether the values on the host are returned.
    tokens._step[1] = 0
    assert tokens.drafts_of(candidates[:, 3:]).tolist() == [[0, 8, 9]] and tokens.last(candidates) == 9
    assert tokens.drafts_of(other).tolist() == [[7, 8, 9]]
    assert tokens.drafts_of(candidates[:, 2:]).tolist() == [[6, 7, 8, 9]] and tokens.last(after) is None
    drafts = tokens.of(ids)[1:].tolist()
    candidates = torch.cat((ids, ids[:, 1:]), dim=1)
    tokens.draft(drafts, candidates)
    # A nested call does this.
    tokens.of(other)
    assert tokens.drafts_of(candidates[:, 3:]).tolist() == [[5, 6]]
    candidates[0, -1] = 1
    assert tokens.drafts_of(candidates[:, 3:]).tolist() == [[5, 1]] and tokens.last(candidates) is None


def test_an_end_token_without_dimensions_is_supported(pair):
    prepared, stock = pair()
    end = EosTokenCriteria(looked_up(stock, repeating(1))[0, -9])
    results = [looked_up(model, repeating(1), stopping_criteria=[end]) for model in (prepared, stock)]
    assert torch.equal(*results)


def test_a_criterion_that_is_replaced_during_a_call_is_called(pair):
    call = EosTokenCriteria.__call__
    lengths = []

    def observed(self, input_ids, *args, **kwargs):
        lengths[-1].append(input_ids.shape[1])
        return call(self, input_ids, *args, **kwargs)

    for model in pair():
        looked_up(model, repeating(2))
        lengths.append([])
        try:
            looked_up(
                model, repeating(2), streamer=Streamer({9: lambda _: setattr(EosTokenCriteria, "__call__", observed)})
            )
        finally:
            EosTokenCriteria.__call__ = call
    assert lengths[0] == lengths[1] and len(lengths[0]) > 4


@pytest.mark.parametrize(
    "replaced", ["the method of the model", "the method of the class", "the generator", "its method"]
)
def test_generators_of_the_user_receive_tensors(replaced, pair, monkeypatch):
    received = []

    class Generator(utils.PromptLookupCandidateGenerator):
        def update_candidate_strategy(self, input_ids, scores, num_matches):
            received.append(scores)

    def generator(*_, generation_config, **__):
        end = torch.tensor(NEVER)
        return Generator(end[None], num_output_tokens=4, max_length=generation_config.max_length)

    models = pair(graphs=None)
    for model in models:
        looked_up(model, repeating())
    if replaced == "the method of the model":
        for model in models:
            model._get_candidate_generator = generator
    elif replaced == "the method of the class":
        monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", generator)
    elif replaced == "the generator":
        monkeypatch.setattr(utils, "PromptLookupCandidateGenerator", Generator)
    else:
        kind = utils.PromptLookupCandidateGenerator
        monkeypatch.setattr(kind, "update_candidate_strategy", Generator.update_candidate_strategy)
    results = [looked_up(model, repeating()) for model in models]
    assert torch.equal(*results) and len(received) > 8 and {type(scores) for scores in received} == {torch.Tensor}
    half = len(received) // 2
    for scores, expected in zip(received[:half], received[half:], strict=True):
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


def test_tokens_equal_stock_without_torch_function(pair):
    prepared, stock = pair()
    for _ in range(2):
        with torch._C.DisableTorchFunction():
            assert torch.equal(*(looked_up(model, repeating()) for model in (prepared, stock)))
    assert counted(prepared)[1] > 8


def test_tokens_equal_stock_with_nested_calls(pair):
    prepared, stock = pair()

    class Nested:
        """A streamer that runs other prompts of equal length after every step, with a prepared and a stock model."""

        ids = torch.empty((1, 0), dtype=torch.long)

        def put(self, value):
            self.ids = torch.cat((self.ids, value), dim=1)
            other = {"input_ids": (self.ids + 1) % 61, "attention_mask": torch.ones_like(self.ids)}
            for model in (prepared, stock):
                looked_up(model, other, new=1)

        def end(self):
            pass

    new = looked_up(stock, repeating(1))[0, -NEW:].tolist()
    looked_up(prepared, repeating(1))
    for end in dict.fromkeys(new[-16:]):
        tokens = looked_up(prepared, repeating(1), eos_token_id=end, streamer=Nested())
        assert torch.equal(tokens, looked_up(stock, repeating(1), eos_token_id=end))
