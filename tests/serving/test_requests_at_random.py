"""Requests to a prepared model that arrive, end, fork and are cancelled at random, in continuous batching.

Every request gets the tokens of a separate run, whatever else is in its batch.
"""

from __future__ import annotations

import gc
import random
import time
from functools import cache
from importlib.util import find_spec

import pytest
import transformers

import hf_rocm
from hf_rocm import ops
from hf_rocm.generation import flash_provider
from tests.generation.conftest import make
from tests.serving.batching import RELEASE, one_by_one

pytestmark = [
    pytest.mark.skipif(RELEASE.release < (5, 9), reason="not run: this release has no paged flash attention"),
    pytest.mark.skipif(find_spec("flash_attn") is not None, reason="not run: flash-attn is installed and is used"),
]

KINDS = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"attn_implementation": "eager", "sliding_window": 8, "tie_word_embeddings": False},
    "gpt_oss": {"attn_implementation": "eager", "sliding_window": 8},
}
# Maximum number of new tokens.
LONGEST = 12
# Maximum number of seconds for all answers on a busy machine.
WAIT = 60.0
# Enough pages for only three or four of the requests below, so that some wait and some are preempted.
CACHE = {"page_size": 8, "num_blocks": 14, "max_batch_tokens": 24}
# Stock's batch fails if a request is forked while a single token of its prompt remains to be processed. This happens
# with a prompt of one token, with shared pages, and with chunked prefill.
FORKED = {"allow_block_sharing": False, "max_batch_tokens": 512}


@cache
def prompts():
    """Some prompts share their first pages, and one is a single token."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 61) for _ in range(17)]
    return [[rng.randrange(3, 61)], *(shared + [rng.randrange(3, 61) for _ in range(more)] for more in (0, 1, 6)),
            *([rng.randrange(3, 61) for _ in range(length)] for length in (7, 8, 9, 23))]  # fmt: skip


@cache
def prepared(kind):
    """Returns a prepared model, and stock's tokens for every prompt in a separate run."""
    model = make(kind, **KINDS[kind])
    alone = one_by_one(model, prompts())
    assert len({tuple(tokens) for tokens in alone}) == len(alone) and all(len(tokens) == LONGEST for tokens in alone)
    return hf_rocm.prepare(model, force=True), alone


@pytest.fixture(scope="module", autouse=True)
def free_models():
    """Free the prepared models after this module's tests. Until they are freed, their classes stay patched."""
    yield
    prepared.cache_clear()


class Walk:
    """Random requests to one manager. forks: answers per request. All but the first are forked from the first."""

    def __init__(self, kind, forks, seed, **settings):
        from transformers.generation import ContinuousBatchingConfig

        self.rng, self.forks = random.Random(seed), forks
        model, self.alone = prepared(kind)
        self.requests, self.cancelled, self.answers = {}, set(), {}
        # top_k=1 selects the most likely token; transformers forks only requests that sample.
        config = transformers.GenerationConfig(
            max_new_tokens=LONGEST, do_sample=True, top_k=1, eos_token_id=-1, num_return_sequences=forks
        )
        batching = ContinuousBatchingConfig(**{**CACHE, **(FORKED if forks > 1 else {}), **settings})
        self.manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
        self.manager.start()

    def run(self, steps):
        try:
            for _ in range(steps):
                (step,) = self.rng.choices((self.arrive, self.cancel, self.wait_for_one), (5, 2, 2))
                step()
            self.collect(lambda: self.answers.keys() >= self.due())
        finally:
            self.manager.stop(block=True, timeout=WAIT)
        rest = self.manager.output_router.output_queue
        while not rest.empty():
            self.receive(rest.get())

    def arrive(self):
        number = self.rng.randrange(1 if self.forks > 1 else 0, len(prompts()))
        name, new = f"request-{len(self.requests)}", self.rng.randint(1, LONGEST)
        self.requests[name] = number, new
        self.manager.add_request(prompts()[number], request_id=name, max_new_tokens=new, eos_token_id=-1)

    def cancel(self):
        if self.live():
            name = self.rng.choice(self.live())
            self.cancelled.add(name)
            self.manager.cancel_request(name)

    def wait_for_one(self):
        if self.live():
            name = self.rng.choice(self.live())
            self.collect(lambda: name in self.answers)

    def live(self):
        return [name for name in self.requests if name not in self.cancelled and name not in self.answers]

    def due(self):
        """Returns the names of all answers that must arrive."""
        children = ["", *(f"__child#{index}" for index in range(self.forks - 1))]
        return {name + child for name in self.requests if name not in self.cancelled for child in children}

    def collect(self, enough):
        deadline = time.monotonic() + WAIT
        while not enough():
            assert time.monotonic() < deadline and self.manager.is_running(), f"no answer: {self.live()}"
            self.receive(self.manager.get_result(timeout=0.05))

    def receive(self, result):
        if result is not None:
            assert result.request_id not in self.answers and result.error is None, result
            self.answers[result.request_id] = list(result.generated_tokens)

    def check(self):
        """Compare the answers. A cancelled request may have finished, or stopped after any token."""
        for name, tokens in self.answers.items():
            number, new = self.requests[name.split("__")[0]]
            expected = self.alone[number][:new]
            assert tokens == (expected if name in self.due() else expected[: len(tokens)]), name


@pytest.mark.parametrize("forks", [1, 2], ids=["", "forked"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_request_has_the_tokens_of_a_separate_run(kind, forks):
    assert walk(kind, forks) == {"varlen_attention"}


@pytest.mark.parametrize("forks", [1, 2], ids=["", "forked"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_requests_over_page_tables_equal_single_runs(kind, forks, page_tables_on_cpu):
    """Requests with more than four pages don't use page tables, and neither do other requests in their batch.

    The ring of a sliding layer has two pages of 5 keys each, for a window of 8 keys.
    """
    pages = {"page_size": 5, "num_blocks": 22, "max_blocks_per_request": 4}
    assert walk(kind, forks, **pages) == {"varlen_attention", "paged_attention"}


def walk(kind, forks, **settings):
    """Run random requests on a model. Returns the attention operations that ran."""
    model, alone = prepared(kind)
    if kind in ("gemma2", "mistral") and len(flash_provider._names()) > 1:
        pytest.skip(f"not run: {flash_provider.batches_refused(model)}")
    own = model.config._attn_implementation
    # This speeds up transformers' garbage collection after every batch.
    gc.freeze()
    try:
        with ops.recording() as routes:
            for seed in range(3):
                requests = Walk(kind, forks, seed, **settings)
                requests.run(steps=40)
                requests.check()
                assert len(requests.cancelled) > 3 and len(requests.due()) > 10
                assert model.config._attn_implementation == own
    finally:
        gc.unfreeze()
    # The model still works.
    assert one_by_one(model, prompts()[:2]) == alone[:2]
    return {route.operation for route in routes if route.operation.endswith("attention")}
