"""Compare continuous batching of a prepared model with stock, in `generate_batch` for requests of mixed lengths.

Both sides use the same weights and calls: a warm-up batch, which also records graphs, and then the measured batch with
the same manager. The tokens of some requests are checked with stock's forward pass. The gap of a side is the largest
difference between the largest logit at a position and the logit of the generated token. The result is wrong if
hf_rocm's gap is more than twice stock's gap and more than a twentieth of the standard deviation of the logits.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, NamedTuple

# Requests whose tokens are checked.
CHECKED = 4


@dataclass(frozen=True)
class Load:
    """A model and its requests.

    shape: the name of the model's shape. shortest, longest: tokens in a prompt. new: tokens to generate per request.
    batching: arguments of `ContinuousBatchingConfig`.
    """

    shape: str
    requests: int
    shortest: int
    longest: int
    new: int
    batching: tuple[tuple[str, Any], ...] = ()


LARGE = Load("llama-8b", 64, 60, 510, 128)
SMALL = Load("small", 5, 3, 20, 8, (("num_blocks", 16), ("max_batch_tokens", 64)))


class Side(NamedTuple):
    """The result of one side.

    seconds: the time of the measured batch. tokens: the number of generated tokens. gap: as defined in the module
    docstring. detail: stock's attention implementation, or the line about batching in hf_rocm's explanation.
    """

    name: str
    seconds: float
    tokens: int
    gap: float
    detail: str

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Outcome(NamedTuple):
    stock: Side
    prepared: Side
    # The fraction of tokens that precede the first different token of their request.
    same: float
    # The standard deviation of the logits of the last checked request.
    spread: float

    @property
    def wrong(self) -> bool:
        """Whether hf_rocm's gap exceeds both limits that the module docstring gives."""
        return self.prepared.gap > max(2 * self.stock.gap, self.spread / 20)


def measure(device: Any, load: Load, progress: Any) -> Outcome:
    """Measure both sides, stock first."""
    import torch

    import hf_rocm
    from hf_rocm.tools.bench.shapes import build

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build(load.shape, device=device, dtype=dtype)
    model.generation_config.eos_token_id = -1
    prompts = _prompts(load, model.config.vocab_size)
    progress("stock")
    seconds, expected = _batches(model, prompts, load)
    stock = seconds, "stock"
    hf_rocm.prepare(model, force=True)
    progress("hf_rocm")
    seconds, actual = _batches(model, prompts, load)
    batching = next((line for line in str(hf_rocm.explain(model).details()).splitlines() if "batching" in line), "")
    hf_rocm.restore(model)
    spread, gaps = _gaps(model, prompts, (expected, actual))
    total = sum(map(len, expected))
    sides = [
        Side(name, seconds, total, gap, detail)
        for name, seconds, gap, detail in (
            ("stock", stock[0], gaps[0], model.config._attn_implementation),
            ("hf_rocm", seconds, gaps[1], batching.strip()),
        )
    ]
    equal = sum(_common(one, other) for one, other in zip(expected, actual, strict=True))
    return Outcome(sides[0], sides[1], same=equal / total, spread=spread)


def table(outcome: Outcome) -> str:
    lines = [f"{'':<10}{'tokens/s':>10}{'seconds':>10}{'gap':>10}"]
    for side in (outcome.stock, outcome.prepared):
        lines.append(f"{side.name:<10}{side.rate:>10.0f}{side.seconds:>10.2f}{side.gap:>10.4f}  {side.detail}")
    ratio = outcome.prepared.rate / outcome.stock.rate
    meaning = "of the tokens come before the first different token of their request"
    lines.append(f"{ratio:.2f} times stock; {outcome.same:.0%} {meaning}")
    if outcome.wrong:
        lines.append(
            f"WRONG: the logit of a token is {outcome.prepared.gap:.3g} below the largest one "
            f"(spread {outcome.spread:.3g})"
        )
    return "\n".join(lines)


def _prompts(load: Load, vocabulary: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(load.shortest, load.longest, load.requests).int()[
        torch.randperm(load.requests, generator=generator)
    ]
    return [torch.randint(3, vocabulary, (int(length),), generator=generator).tolist() for length in lengths]


def _batches(model: Any, prompts: list[list[int]], load: Load) -> tuple[float, list[list[int]]]:
    """Run the same batch twice. Returns the seconds and the tokens of the second run."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    from hf_rocm.tools.bench.clock import now

    options = {
        "generation_config": GenerationConfig(max_new_tokens=load.new, do_sample=False, eos_token_id=-1),
        "continuous_batching_config": ContinuousBatchingConfig(**dict(load.batching), allow_block_sharing=False),
        "persistent_manager": True,
        "progress_bar": False,
    }
    try:
        for _ in range(2):
            gc.collect()
            began = now(model.device)
            results = model.generate_batch(prompts, **options)
            seconds = now(model.device) - began
    finally:
        model.destroy_cached_continuous_batching_manager()
    tokens = [list(result.generated_tokens) for result in results.values()]
    if len(tokens) != len(prompts) or any(len(row) != load.new for row in tokens):
        raise RuntimeError(f"expected {len(prompts)} requests of {load.new} tokens, got {[len(row) for row in tokens]}")
    return seconds, tokens


def _gaps(model: Any, prompts: list[list[int]], sides: Any) -> tuple[float, list[float]]:
    """Return the standard deviation of the logits of the last checked request, and the gap of every side."""
    import torch

    gaps, spread = [], 0.0
    for tokens in sides:
        worst = 0.0
        for prompt, answer in list(zip(prompts, tokens, strict=True))[:CHECKED]:
            ids = torch.tensor([prompt + answer[:-1]], device=model.device)
            with torch.inference_mode():
                logits = model(ids).logits[0, len(prompt) - 1 :].float()
            chosen = logits.gather(1, torch.tensor(answer, device=model.device)[:, None])[:, 0]
            worst = max(worst, float((logits.amax(1) - chosen).max()))
            spread = float(logits.std())
        gaps.append(worst)
    return spread, gaps


def _common(one: list[int], other: list[int]) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
