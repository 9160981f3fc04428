"""The traffic of a case: seeded random prompts of mixed lengths, sent by several clients or at a given rate."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_rocm.tools.bench.serving.client import COMPLETIONS, Request, Response

RESPONSES = ("streamed", "whole", "both")


@dataclass(frozen=True)
class Load:
    """One case. clients: the number of clients in a closed loop, each of which sends one request at a time. None: an
    open loop with `rate` requests per second on average, which does not wait for responses.

    shortest, longest: the range of prompt lengths in tokens. new: tokens per response. answers: `streamed`, `whole`, or
    `both`, alternating. seconds: the time after which no request is sent. endpoint: `completions` or `chat`. leaving:
    the share of streamed requests whose client disconnects when half of the response has arrived.
    """

    clients: int | None
    rate: float | None
    requests: int
    shortest: int
    longest: int
    new: int
    answers: str = "streamed"
    seed: int = 0
    seconds: float = 120.0
    endpoint: str = COMPLETIONS
    leaving: float = 0.0

    @property
    def title(self) -> str:
        if self.clients is not None:
            return f"closed loop, {self.clients} client{'s' * (self.clients != 1)}"
        return f"open loop, {self.rate:g} requests per second"

    @property
    def details(self) -> str:
        lengths = f"{self.shortest} to {self.longest}" if self.shortest < self.longest else f"{self.longest}"
        kinds = "streamed and whole" if self.answers == "both" else self.answers
        chat = ", chat" if self.endpoint != COMPLETIONS else ""
        left = f", {100 * self.leaving:.0f} % of the streams abandoned" if self.leaving else ""
        return f"{self.requests} requests, prompts of {lengths} tokens, {self.new} new tokens each, {kinds}{chat}{left}"


class Traffic(NamedTuple):
    """The responses in the order of the requests, the seconds from the first request to the last response, and the
    number of requests that were not sent in time."""

    responses: tuple[Response, ...]
    seconds: float
    unsent: int


Send = Callable[[Request], Awaitable[Response]]
Progress = Callable[[int, int], None]


def plan(load: Load, tokenizer: Any) -> list[Request]:
    """Return the requests of a case. The same load and tokenizer always give the same requests."""
    rng = random.Random(load.seed)
    words = _words(tokenizer, rng)
    lengths = [rng.randint(load.shortest, load.longest) for _ in range(load.requests)]
    streams = [
        load.answers == "streamed" or (load.answers == "both" and index % 2 == 0) for index in range(load.requests)
    ]
    prompts = [_prompt(tokenizer, words, length, rng) for length in lengths]
    leaves = [stream and rng.random() < load.leaving for stream in streams]
    return [
        Request(prompt, load.new, stream, load.endpoint, leave)
        for prompt, stream, leave in zip(prompts, streams, leaves, strict=True)
    ]


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Return Poisson arrival times in seconds, the first at 0. The gaps are exponential with mean 1 / rate."""
    rng = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]


async def drive(load: Load, requests: list[Request], send: Send, *, progress: Progress = lambda *_: None) -> Traffic:
    """Send the requests as the load describes, and wait for the responses to all requests that were sent in time."""
    responses: list[Response | None] = [None] * len(requests)
    began = time.perf_counter()
    finished = 0

    async def send_one(index: int) -> None:
        nonlocal finished
        responses[index] = await send(requests[index])
        finished += 1
        progress(finished, len(requests))

    if load.clients is not None:
        await _closed_loop(load, len(requests), send_one, began)
    else:
        await _open_loop(load, len(requests), send_one, began)
    done = tuple(response for response in responses if response is not None)
    return Traffic(done, time.perf_counter() - began, len(requests) - len(done))


async def _closed_loop(load: Load, count: int, send_one: Callable[[int], Awaitable[None]], began: float) -> None:
    waiting = iter(range(count))

    async def client() -> None:
        for index in waiting:
            if time.perf_counter() - began > load.seconds:
                return
            await send_one(index)

    await asyncio.gather(*(client() for _ in range(min(load.clients or 1, count))))


async def _open_loop(load: Load, count: int, send_one: Callable[[int], Awaitable[None]], began: float) -> None:
    assert load.rate is not None
    async with _Tasks() as tasks:
        for index, due in enumerate(arrivals(load.rate, count, load.seed)):
            if due > load.seconds:
                return
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            tasks.start(send_one(index))


class _Tasks:
    """Tasks that are awaited at the end of the block, or cancelled if it fails. (TaskGroup needs Python 3.11.)"""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> _Tasks:
        return self

    def start(self, work: Awaitable[None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)


# The number of tokens to examine, and the number of words that suffices.
_MAX_TOKENS, _MAX_WORDS = 20_000, 500


def _words(tokenizer: Any, rng: random.Random) -> list[str]:
    """Return up to `_MAX_WORDS` words, each the text of a single token, or only `the` if no such token was found."""
    size = len(tokenizer)
    tokens = rng.sample(range(size), min(size, _MAX_TOKENS))
    words: list[str] = []
    for token in tokens:
        word = tokenizer.decode([token]).strip()
        if word.isascii() and word.isalpha():
            words.append(word)
            if len(words) == _MAX_WORDS:
                break
    return words or ["the"]


def _prompt(tokenizer: Any, words: list[str], length: int, rng: random.Random) -> str:
    """Return random words with at most `length` tokens in total, but at least one word."""
    chosen = [rng.choice(words) for _ in range(length)]

    def fits(count: int) -> bool:
        return len(tokenizer(" ".join(chosen[:count]))["input_ids"]) <= length

    # The usual case.
    if fits(length):
        return " ".join(chosen)
    low, high = 1, length - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return " ".join(chosen[:low])
