"""Check that every greedy token has the largest or almost the largest logit in the reference, and check replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_rocm.loading.prepare import REPORT
from hf_rocm.tolerance import allowed_error
from hf_rocm.tools.verify.check import FAILED, NOT_RUN, PASSED, Check, Fault
from hf_rocm.tools.verify.judge import is_moe
from hf_rocm.tools.verify.model_under_test import Subject, is_causal_lm

TOKENS = "greedy tokens", "generate compared with stock, token by token"
GRAPHS = "graph replay", "generate with recorded steps compared with uncaptured steps"


def greedy_tokens(subject: Subject, ids: Tensor, *, new: int) -> Check:
    """Generate `new` tokens, and check every token against the reference's logits for the same text.

    If two tokens are almost equally likely, rounding decides between them, and the texts differ afterwards. So every
    token that hf_rocm generates is checked on hf_rocm's own text. Its logit in the reference may be lower than the best
    logit by up to the sum of the errors of both logits. Each of these errors may be up to twice stock's own error plus
    a rounding step. With routed experts, the median over the tokens is compared.
    """
    if not is_causal_lm(subject):
        return Check(*TOKENS, NOT_RUN, note="the model generates no text")
    prompt, new = _prompt(subject, ids, new)
    actual = generate(subject, prompt, new)
    with subject.stock():
        expected = generate(subject, prompt, new)
    return _judged(subject, TOKENS, actual, expected, prompt.shape[1], "stock's")


def replay_against_uncaptured(subject: Subject, ids: Tensor, *, new: int) -> Check:
    """Compare generation with and without recorded steps. A second call replays the recordings of the first one."""
    if not is_causal_lm(subject):
        return Check(*GRAPHS, NOT_RUN, note="the model generates no text")
    prompt, new = _prompt(subject, ids, new)
    before = _replayed(subject)
    first, second = generate(subject, prompt, new), generate(subject, prompt, new)
    steps = _replayed(subject) - before
    reason = _wrong_replay(subject)
    # The tokens are correct, because the call was repeated without recordings.
    if reason is not None:
        return Check(*GRAPHS, FAILED, numbers={"replayed": float(steps)}, note=reason)
    if not steps:
        return Check(*GRAPHS, NOT_RUN, note=_why_not(subject))
    plain = generate(subject, prompt, new, recorded=False)
    check = _judged(subject, GRAPHS, second, plain, prompt.shape[1], "those of uncaptured steps")
    numbers = {**check.numbers, "replayed": float(steps)}
    note = f"{steps} steps replayed; {check.note}"
    if not torch.equal(first, second):
        note = "two calls with the same recordings returned different tokens"
        return Check(*GRAPHS, FAILED, check.error, check.allowed, numbers, note, check.fault)
    return Check(*GRAPHS, check.status, check.error, check.allowed, numbers, note, check.fault)


def generate(subject: Subject, prompt: Tensor, new: int, *, recorded: bool = True) -> Tensor:
    """Generate greedily with the model's pad token, or 0, and an otherwise default generation config.

    prompt: [B, S]. recorded: False disables recorded steps. Returns [B, S + new].
    """
    model: Any = subject.model
    options = {} if recorded else {"disable_compile": True}
    with _plain_generation(model), torch.no_grad():
        tokens: Tensor = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new, **options
        )
    return tokens


def _judged(subject: Subject, name: tuple[str, str], actual: Tensor, expected: Tensor, start: int, owner: str) -> Check:
    """Check the tokens from position `start` on. actual, expected: [1, S] tokens that agree before `start`."""
    with subject.stock():
        eager = _logits(subject, actual, start)
    with subject.reference():
        exact = _logits(subject, actual, start)
    text = actual[0, start:].cpu()
    gaps = exact.amax(-1) - exact.gather(-1, text[:, None])[:, 0]
    eager_error = (eager - exact).abs().max().item()
    bound = 2 * allowed_error(eager_error, subject.dtype, exact.abs().max().item())
    differs = (actual[0] != expected[0])[start:].cpu().nonzero()
    numbers = {"steps": float(len(text)), "same": float(len(text))}
    note = f"all {len(text)} tokens are equal to {owner}"
    if len(differs):
        first = int(differs[0])
        best = exact[first].topk(2).values
        numbers |= {"same": float(first), "margin": float(best[0] - best[1]), "behind": float(gaps[first])}
        note = (
            f"the first {first} of {len(text)} tokens are equal to {owner}; after them, the reference's two largest "
            f"logits are {numbers['margin']:.2e} apart, and the logit of hf_rocm's token is {numbers['behind']:.2e} "
            "below the largest"
        )
    # with routed experts, two almost equal router scores can change a token's logits by any amount, so the median
    # is compared
    worst = (gaps.median() if is_moe(subject) else gaps.max()).item()
    fault = None
    # The negated comparison is also true if the difference is NaN.
    if not worst <= bound:
        index = int((~(gaps <= bound)).nonzero()[0])
        words = f"token {int(text[index])} instead of {int(exact[index].argmax())}"
        fault = Fault(f"step {index}", words, float(gaps[index]), bound)
    return Check(*name, PASSED if fault is None else FAILED, worst, bound, numbers, note, fault)


def _prompt(subject: Subject, ids: Tensor, new: int) -> tuple[Tensor, int]:
    """Return the prompt, [1, S], and `new`, reduced to the number of tokens that fit after the prompt."""
    prompt = ids[None, : max(1, min(24, len(ids) // 2))].to(subject.device)
    most = getattr(subject.text_config, "max_position_embeddings", None) or prompt.shape[1] + new
    return prompt, max(1, min(new, int(most) - prompt.shape[1] - 1))


@contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    import transformers

    own = model.generation_config
    pad = next((token for token in (own.pad_token_id, model.config.pad_token_id) if token is not None), 0)
    model.generation_config = transformers.GenerationConfig(pad_token_id=pad)
    try:
        yield
    finally:
        model.generation_config = own


def _logits(subject: Subject, ids: Tensor, start: int) -> Tensor:
    """Return the logits from which the tokens from position `start` on are chosen, [N, V] in float64 on the CPU."""
    with torch.no_grad():
        output = subject.model(input_ids=ids, use_cache=False)
    return subject.final(output)[0, start - 1 : -1].double().cpu()


def _replayed(subject: Subject) -> int:
    from hf_rocm.generation.state import known

    state = known(subject.generator)
    return 0 if state is None else state.replayed


def _wrong_replay(subject: Subject) -> str | None:
    from hf_rocm.generation.state import known

    state = known(subject.generator)
    return None if state is None else state.wrong_replay


def _why_not(subject: Subject) -> str:
    from hf_rocm.generation.decide import refuses_device
    from hf_rocm.generation.state import known

    state = known(subject.generator)
    disabled = (subject.model.__dict__[REPORT].get("graphs") or {}).get("off")
    reason = (
        disabled
        or (state and (state.disabled or next(iter(state.turned_away), None)))
        or refuses_device(subject.generator)
    )
    return reason or "no step was replayed"
