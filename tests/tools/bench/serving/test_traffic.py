"""Seeded traffic: prompt lengths, arrival times, and the number of concurrent requests."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from hf_rocm.tools.bench.serving.client import Response
from hf_rocm.tools.bench.serving.traffic import Load, arrivals, drive, plan

CLOSED = Load(3, None, 12, 5, 20, 8)
OPEN = replace(CLOSED, clients=None, rate=200.0)


class Words:
    """A tokenizer in which every word is one token. Its last three tokens must not occur in prompts."""

    words = ("one", "two", "three", "four", "é", "5", "")

    def __len__(self):
        return len(self.words)

    def __call__(self, text):
        return {"input_ids": text.split()}

    def decode(self, ids):
        return " ".join(self.words[number] for number in ids)


class Halves(Words):
    """A tokenizer in which every word is two tokens."""

    def __call__(self, text):
        return {"input_ids": text.split() * 2}


class Clients:
    """Answer requests after some time, and count how many are in progress at once."""

    def __init__(self, seconds=0.01):
        self.seconds, self.now, self.most, self.began = seconds, 0, 0, []

    async def __call__(self, request):
        sent = time.perf_counter()
        self.began.append(sent)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.seconds)
        self.now -= 1
        return Response(sent, time.perf_counter(), tokens=request.new)


def test_only_streams_are_abandoned_in_the_given_share():
    load = replace(CLOSED, requests=400, answers="both", leaving=0.25)
    requests = plan(load, Words())
    assert 0.2 < sum(one.leave for one in requests if one.stream) / 200 < 0.3
    assert not any(one.leave for one in requests if not one.stream)
    assert "25 % of the streams abandoned" in load.details
    # the share changes neither prompts nor lengths
    assert [one.prompt for one in requests] == [one.prompt for one in plan(replace(load, leaving=0.0), Words())]


def traffic(load, clients):
    return asyncio.run(drive(load, plan(load, Words()), clients))


def test_the_same_seed_gives_the_same_requests():
    assert plan(CLOSED, Words()) == plan(CLOSED, Words())
    assert plan(CLOSED, Words()) != plan(replace(CLOSED, seed=1), Words())


def test_prompts_have_mixed_lengths_within_the_range():
    prompts = [request.prompt.split() for request in plan(replace(CLOSED, requests=200), Words())]
    lengths = {len(prompt) for prompt in prompts}
    assert lengths == set(range(5, 21))
    assert {word for prompt in prompts for word in prompt} == {"one", "two", "three", "four"}


def test_a_prompt_has_no_more_tokens_than_requested():
    lengths = {2 * len(request.prompt.split()) for request in plan(replace(CLOSED, requests=200), Halves())}
    assert lengths == set(range(4, 21, 2))


def test_answers_are_streamed_or_whole_or_alternate():
    for answers, expected in (("streamed", {True}), ("whole", {False}), ("both", {True, False})):
        streams = [request.stream for request in plan(replace(CLOSED, answers=answers), Words())]
        assert set(streams) == expected
    assert streams[:4] == [True, False, True, False]


def test_arrivals_are_a_seeded_poisson_process():
    times = arrivals(4.0, 4001, seed=1)
    assert times == arrivals(4.0, 4001, seed=1) != arrivals(4.0, 4001, seed=2)
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    # the mean and the standard deviation of 4000 exponential gaps are both 1 / 4, within four standard errors
    assert abs(mean - 0.25) < 4 * 0.25 / math.sqrt(4000) and abs(deviation - 0.25) < 4 * 0.25 * math.sqrt(2 / 4000)
    assert times[0] == 0 and len(times) == 4001


def test_a_closed_loop_has_as_many_requests_in_flight_as_clients():
    clients = Clients()
    done = traffic(CLOSED, clients)
    assert clients.most == CLOSED.clients and len(done.responses) == CLOSED.requests and done.unsent == 0
    assert done.seconds >= CLOSED.requests / CLOSED.clients * clients.seconds


def test_an_open_loop_does_not_wait_for_answers():
    clients = Clients(seconds=0.2)
    done = traffic(OPEN, clients)
    assert clients.most == OPEN.requests == len(done.responses)
    due = arrivals(OPEN.rate, OPEN.requests, OPEN.seed)
    assert all(began - clients.began[0] >= expected - 0.01 for began, expected in zip(clients.began, due, strict=True))


@pytest.mark.parametrize("load", [CLOSED, replace(OPEN, rate=20.0)], ids=["closed", "open"])
def test_no_request_is_sent_after_the_time_limit(load):
    clients = Clients(seconds=0.1)
    done = traffic(replace(load, seconds=0.15, requests=40), clients)
    assert 0 < len(done.responses) < 40 and done.unsent == 40 - len(done.responses)
    assert max(clients.began) - clients.began[0] < 0.4


def test_titles_and_details_describe_the_load():
    assert (
        CLOSED.title == "closed loop, 3 clients"
        and replace(OPEN, rate=0.5).title == "open loop, 0.5 requests per second"
    )
    assert CLOSED.details == "12 requests, prompts of 5 to 20 tokens, 8 new tokens each, streamed"
    assert "of 7 tokens" in replace(CLOSED, shortest=7, longest=7).details
