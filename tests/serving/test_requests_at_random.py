"""Requests that arrive, end, fork and are cancelled at random, through transformers' continuous batching of a prepared
model: each gets the tokens of a run alone, whatever runs beside it."""

from __future__ import annotations

import random
import time
from collections import Counter
from functools import cache
from importlib.util import find_spec

import pytest
import transformers
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import hf_rocm
from hf_rocm import ops
from hf_rocm.generation import flash_provider
from tests.generation.conftest import make
from tests.serving.batching import RELEASE, one_by_one

pytestmark = [
    pytest.mark.skipif(RELEASE.release < (5, 9), reason="not run: this release has no flash attention over pages"),
    pytest.mark.skipif(find_spec("flash_attn") is not None, reason="not run: flash-attn is installed and is used"),
]

KINDS = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"attn_implementation": "eager", "sliding_window": 8, "tie_word_embeddings": False},
    "gpt_oss": {"attn_implementation": "eager", "sliding_window": 8},
}
LONGEST = 12  # new tokens
WAIT = 60.0  # seconds for all answers, on a machine that has other things to do
# Pages for three or four of the requests below, so that some wait and some are put off while they run.
CACHE = {"page_size": 8, "num_blocks": 14, "max_batch_tokens": 24}


@cache
def prompts():
    """Some share their first pages, and one is a single token."""
    chance = random.Random(5)
    shared = [chance.randrange(3, 61) for _ in range(17)]
    return [[chance.randrange(3, 61)], *(shared + [chance.randrange(3, 61) for _ in range(more)] for more in (0, 1, 6)),
            *([chance.randrange(3, 61) for _ in range(length)] for length in (7, 8, 9, 23))]  # fmt: skip


@cache
def prepared(kind):
    """A prepared model, and the tokens of stock for each prompt alone."""
    model = make(kind, **KINDS[kind])
    alone = one_by_one(model, prompts())
    assert len({tuple(tokens) for tokens in alone}) == len(alone) and all(len(each) == LONGEST for each in alone)
    return hf_rocm.prepare(model, force=True), alone


class Requests(RuleBasedStateMachine):
    """kind: of the model. forks: answers of each request; the second and later ones are forked from the first."""

    kind: str
    forks: int

    @initialize()
    def begin(self):
        from transformers.generation import ContinuousBatchingConfig

        self.model, self.alone = prepared(self.kind)
        self.own = self.model.config._attn_implementation
        self.asked, self.cancelled, self.answers = {}, set(), {}
        config = transformers.GenerationConfig(
            max_new_tokens=LONGEST, do_sample=True, top_k=1, eos_token_id=-1, num_return_sequences=self.forks
        )  # the most likely token; transformers forks only requests that sample
        batching = ContinuousBatchingConfig(**CACHE)
        self.manager = self.model.init_continuous_batching(
            generation_config=config, continuous_batching_config=batching
        )
        self.manager.start()

    @rule(number=st.integers(0, len(prompts()) - 1), new=st.integers(1, LONGEST))
    def arrive(self, number, new):
        name = f"request-{len(self.asked)}"
        self.asked[name] = number, new
        self.manager.add_request(prompts()[number], request_id=name, max_new_tokens=new, eos_token_id=-1)

    @precondition(lambda self: self.live())
    @rule(chance=st.randoms(use_true_random=False))
    def cancel(self, chance):
        name = chance.choice(self.live())
        self.cancelled.add(name)
        self.manager.cancel_request(name)

    @precondition(lambda self: self.live())
    @rule(chance=st.randoms(use_true_random=False))
    def wait_for_one(self, chance):
        name = chance.choice(self.live())
        self.collect(lambda: name in self.answers)

    def live(self):
        return [name for name in self.asked if name not in self.cancelled and name not in self.answers]

    def collect(self, enough):
        deadline = time.monotonic() + WAIT
        while not enough():
            assert time.monotonic() < deadline, f"no answer: {self.live()}"
            assert self.manager.is_running()
            self.receive(self.manager.get_result(timeout=0.05))

    def receive(self, result):
        if result is not None:
            assert result.request_id not in self.answers and result.error is None
            self.answers[result.request_id] = list(result.generated_tokens)

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        due = [
            name + child
            for name in self.asked
            if name not in self.cancelled
            for child in ("", *(f"__child#{index}" for index in range(self.forks - 1)))
        ]
        try:
            self.collect(lambda: self.answers.keys() >= set(due))
        finally:
            self.manager.stop(block=True, timeout=WAIT)
        while not self.manager.output_router.output_queue.empty():
            self.receive(self.manager.output_router.output_queue.get())
        for name, tokens in self.answers.items():
            number, new = self.asked[name.split("__")[0]]
            expected = self.alone[number][:new]
            assert tokens == (expected if name in due else expected[: len(tokens)]), name
        assert self.model.config._attn_implementation == self.own
        seen.update(arrived=len(self.asked), cancelled=len(self.cancelled), answered=len(due))


seen: Counter = Counter()


@pytest.mark.parametrize("forks", [1, 2], ids=["", "forked"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_request_gets_the_tokens_of_a_run_alone(kind, forks):
    model, _ = prepared(kind)
    if kind in ("gemma2", "mistral") and len(flash_provider._names()) > 1:
        pytest.skip(f"not run: {flash_provider.batches_refused(model)}")
    seen.clear()
    machine = type(f"{kind}-{forks}", (Requests,), {"kind": kind, "forks": forks})
    with ops.recording() as routes:
        machine.TestCase.settings = settings(
            max_examples=6, stateful_step_count=12, suppress_health_check=list(HealthCheck)
        )
        machine.TestCase("runTest").runTest()
    assert {each.operation for each in routes if each.operation.endswith("attention")} == {"varlen_attention"}
    assert seen["answered"] > 10 and seen["cancelled"] > 2 and seen["arrived"] > seen["cancelled"]
    assert one_by_one(model, prompts()[:2]) == prepared(kind)[1][:2]  # the model works as before
