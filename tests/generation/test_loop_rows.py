"""The sampling loop appends tokens in one operation and returns stock's tokens, whatever ends its rows."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial

import pytest
import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from hf_rocm import ops, options
from hf_rocm.errors import TierUnavailable
from hf_rocm.generation import deferred_stop, loop_rows, resident_inputs
from hf_rocm.generation.loop_rows import Rows
from hf_rocm.generation.streams import HostCopy
from tests.generation.conftest import SAMPLED, Streamer, counted, generate, prompt


@pytest.fixture
def appended(monkeypatch):
    """Append tokens in one operation, as on a GPU. Returns the list of results."""
    results, append = Results(), ops.append_tokens

    def appending(*arguments):
        results.append(append(*arguments))
        results.arguments.append(arguments)
        return results[-1]

    monkeypatch.setattr(loop_rows, "one_kernel", lambda *_: True)
    monkeypatch.setattr(ops, "append_tokens", appending)
    return results


class Results(list):
    """The results of `append_tokens`. arguments: those of the same calls."""

    def __init__(self):
        super().__init__()
        self.arguments = []


@pytest.fixture(params=["at once", "late"])
def stop_check(request):
    """Check immediately, or one step late, whether all rows have ended."""
    if request.param == "late":
        request.getfixturevalue("ends_checked_late")


def ends_of(tokens, at):
    """The new tokens of row 0 at these indices. As EOS tokens, they end the rows at different steps."""
    return [int(tokens[0, 7 + index]) for index in at]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("at", [(), (12,), (9, 15)], ids=str)
def test_rows_end_at_the_same_steps_as_in_stock(at, rows, sampling, pair, appended, stop_check):
    prepared, stock = pair()
    inputs = prompt(rows=rows)
    ends = ends_of(generate(stock, inputs, new=25, seed=0, **sampling), at)
    settings = {**sampling, **({"eos_token_id": ends} if ends else {})}
    for seed in (0, 0, 1):
        for pad in (0, *ends[:1]):
            expected = generate(stock, inputs, new=25, seed=seed, pad_token_id=pad, **settings)
            tokens = generate(prepared, inputs, new=25, seed=seed, pad_token_id=pad, **settings)
            assert torch.equal(tokens, expected) and tokens.is_contiguous()
    assert len(appended) > 4 and counted(prepared)[1] > 4
    if ends and rows == 3:
        assert any(bool((unfinished == 0).any()) and not done for _, unfinished, done in appended)


def test_flags_of_deferred_checks_are_copied_while_steps_run(pair, ends_checked_late, monkeypatch):
    """From 5.17 on, a class of transformers performs the deferred check; in earlier releases, hf_rocm does."""
    sent, send = [], HostCopy.send
    monkeypatch.setattr(HostCopy, "send", lambda self, tensor: sent.append(tensor) or send(self, tensor))
    check = deferred_stop._stock_check()
    before = None if check is None else dict(vars(check))
    prepared, stock = pair()
    inputs = prompt(rows=2)
    ends = ends_of(generate(stock, inputs, new=25), (14,))
    for settings in ({}, {"eos_token_id": ends, "pad_token_id": 0}):
        sent.clear()
        expected = generate(stock, inputs, new=25, **settings)
        assert not sent
        assert torch.equal(generate(prepared, inputs, new=25, **settings), expected)
        flags = [tensor for tensor in sent if tensor.dtype == torch.bool and tensor.ndim == 0]
        assert len(flags) >= expected.shape[1] - inputs["input_ids"].shape[1] - 1
    assert check is None or before == dict(vars(check))


def test_appended_tokens_are_written_to_the_input_of_the_next_step(pair, appended, monkeypatch):
    copies, copy_tokens = [], resident_inputs._copy
    monkeypatch.setattr(resident_inputs, "_copy", lambda *tensors: copies.append(tensors) or copy_tokens(*tensors))
    prepared, stock = pair()
    inputs = prompt(rows=2)
    expected = generate(stock, inputs, new=25)
    assert torch.equal(generate(prepared, inputs, new=25), expected)
    before, steps = len(appended), counted(prepared)[1]
    copies.clear()
    assert torch.equal(generate(prepared, inputs, new=25), expected)
    assert len(appended) - before > 20 and counted(prepared)[1] - steps > 20
    # The first step copies its tokens, and so does a step after an uncaptured one, which transformers appended.
    assert 0 < len(copies) < 5
    assert sum(arguments[5] is not None for arguments in appended.arguments[before:]) > 18


def test_a_step_copies_tokens_that_may_have_changed():
    rows, place = Rows(lambda: lambda length: None), torch.zeros(2, 1, dtype=torch.int64)
    ids, tokens, unfinished = torch.ones(2, 3).long(), torch.tensor([5, 6]), torch.ones(2).long()
    with options.override(tier="torch"):
        rows._serves = True
        after = rows.append(ids, tokens, unfinished, None)
        assert not rows.copied(after, place) and place.tolist() == [[0], [0]]
        rows.step_ids = place
        assert not rows.copied(after, place)
        after = rows.append(ids, tokens, unfinished, None)
        assert rows.copied(after, place) and place.tolist() == [[5], [6]]
        assert not rows.copied(after.clone(), place)
        after[0, -1] = 7
        assert not rows.copied(after, place)
        after = rows.append(ids, tokens, unfinished, None)
        assert not rows.copied(after, place.clone()), "this step reads another tensor"
        assert rows.copied(after, place)
        with torch.inference_mode():
            after = rows.append(ids, tokens, unfinished, None)
            assert not rows.copied(after, place), "inference tensors don't count their changes"
        rows.step_ids = torch.zeros(2, 1)
        after = rows.append(ids, tokens, unfinished, None)
        assert not rows.copied(after, rows.step_ids) and not rows.step_ids.any(), "its dtype differs"


def test_streamed_tokens_equal_the_result(pair, appended, stop_check):
    prepared, stock = pair()
    inputs = prompt(rows=1)
    ends = ends_of(generate(stock, inputs, new=25), (14,))
    for _ in range(2):
        streamers = Streamer(), Streamer()
        for model, streamer in zip((prepared, stock), streamers, strict=True):
            generate(model, inputs, new=25, eos_token_id=ends, pad_token_id=0, streamer=streamer)
        assert streamers[0].values == streamers[1].values
    assert len(appended) > 15


def test_with_other_criteria_transformers_appends_the_tokens(pair, appended):
    prepared, stock = pair()
    late = StoppingCriteriaList([MaxTimeCriteria(1000.0, initial_timestamp=time.time())])
    for _ in range(2):
        tokens = generate(prepared, new=15, eos_token_id=3, pad_token_id=0, stopping_criteria=late)
        assert torch.equal(tokens, generate(stock, new=15, eos_token_id=3, pad_token_id=0, stopping_criteria=late))
    assert not appended and counted(prepared)[1] > 10


def test_without_a_kernel_no_value_has_a_stand_in(pair, monkeypatch):
    prepared, stock = pair()
    created = []
    monkeypatch.setattr(
        loop_rows, "_Column", lambda *arguments: created.append(arguments) or pytest.fail("not expected")
    )
    monkeypatch.setattr(loop_rows.Rows, "active", False)
    assert torch.equal(generate(prepared, new=20, eos_token_id=3), generate(stock, new=20, eos_token_id=3))
    assert not created


@pytest.mark.parametrize("kind", [loop_rows.Tokens, loop_rows._Padded])
def test_a_stand_in_has_the_value_that_stock_computes(kind):
    unfinished = loop_rows.Unfinished(torch.tensor([1, 0, 1]), None, one=False)
    rows = loop_rows.Rows(lambda: None)
    tokens, pad = torch.tensor([5, 6, 7]), torch.tensor(9)
    next_tokens = loop_rows.Tokens(rows, tokens)
    real = tokens
    if kind is loop_rows._Padded:
        next_tokens = next_tokens * unfinished + pad * (1 - unfinished)
        real = tokens * unfinished.tensor() + pad * (1 - unfinished.tensor())
        assert real.tolist() == [5, 9, 7]
    assert type(next_tokens) is kind
    rows.current = unfinished
    ids = torch.zeros(3, 2, dtype=torch.int64)
    for column in (next_tokens[:, None], next_tokens[:, None]):
        assert torch.equal(torch.cat([ids, column], dim=-1), torch.cat([ids, real[:, None]], dim=-1))
        assert torch.equal(torch.cat((column, column), 1), torch.stack((real, real), 1))
    assert torch.equal(next_tokens + 1, real + 1) and torch.equal(next_tokens * real, real * real)
    assert torch.equal(next_tokens[1:], real[1:]) and torch.equal(next_tokens.cpu(), real)
    assert torch.equal(torch.zeros(3, dtype=torch.int64).copy_(next_tokens), real)
    assert torch.equal(1 - unfinished, torch.tensor([0, 1, 0])) and torch.equal(
        unfinished - 1, torch.tensor([0, -1, 0])
    )
    assert torch.equal(2 * (1 - unfinished), torch.tensor([0, 2, 0])) and int(unfinished.max()) == 1
    assert bool(unfinished.max() == 1) and not bool(unfinished.max() == 0)
    assert torch.equal(unfinished & torch.tensor([1, 1, 0]), torch.tensor([1, 0, 0]))


# Every entry: a function that returns a criterion, and a change to the criterion that ends the row.
CHANGES = {
    "length": (lambda: MaxLengthCriteria(40), lambda criterion, token: setattr(criterion, "max_length", 5)),
    "ends": (
        lambda: EosTokenCriteria([60]),
        lambda criterion, token: setattr(criterion, "eos_token_id", token.clone()),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_streamer_can_end_the_call_through_a_criterion(change, pair, appended):
    """Before transformers 5.17, tokens are streamed after they are appended and before the criteria are called."""
    prepared, stock = pair()
    make, act = CHANGES[change]

    lengths = []
    for model in (stock, prepared, prepared):
        criterion = make()
        settings = {
            "stopping_criteria": StoppingCriteriaList([criterion]),
            "streamer": Streamer({13: partial(act, criterion)}),
        }
        settings |= {"eos_token_id": 60} if change == "ends" else {}
        lengths.append(generate(model, prompt(rows=1), new=30, pad_token_id=0, **settings).shape[1])
    assert lengths[1:] == lengths[:1] * 2 and appended


@pytest.mark.parametrize("ends", [torch.tensor(9), torch.tensor([[9, 4], [33, 9]])], ids=["one", "two dims"])
def test_end_tokens_of_any_shape_are_supported(ends, pair, appended):
    prepared, stock = pair()
    for _ in range(2):
        settings = {"pad_token_id": 0, "new": 25}
        tokens = generate(prepared, stopping_criteria=StoppingCriteriaList([EosTokenCriteria(ends)]), **settings)
        assert torch.equal(
            tokens, generate(stock, stopping_criteria=StoppingCriteriaList([EosTokenCriteria(ends)]), **settings)
        )
    assert appended and all(arguments[3].ndim == 1 for arguments in appended.arguments)


def test_criteria_are_freed_with_the_call(pair, appended):
    prepared, _ = pair()
    gc.collect()
    gc.disable()
    try:
        criterion = MaxLengthCriteria(40)
        reference = weakref.ref(criterion)
        generate(prepared, new=20, stopping_criteria=StoppingCriteriaList([criterion]))
        del criterion
        assert reference() is None and appended
    finally:
        gc.enable()


def test_transformers_appends_the_tokens_if_the_requested_tier_cannot(pair, appended, monkeypatch):
    prepared, stock = pair()

    def unavailable(*_):
        raise TierUnavailable("not here")

    monkeypatch.setattr(ops, "append_tokens", unavailable)
    assert torch.equal(generate(prepared, new=20, eos_token_id=3), generate(stock, new=20, eos_token_id=3))
    assert not appended
