"""Record the work between a step's logits and its sampled tokens: transformers' processors, softmax and the draw.

transformers runs dozens of small kernels here, and reads the signature of every processor. The recording has the same
operators in the same order, so the probabilities are the same. Random numbers are not recorded: PyTorch's own generator
fills a tensor before every replay, as `torch.multinomial` does, so the tokens and the state of the generator are the
same, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm.generation.random_state import default_generator
from hf_rocm.generation.recorded_step import Recorded, RecordedStep
from hf_rocm.generation.recorder import Recorder
from hf_rocm.generation.step import Inputs
from hf_rocm.ops.bits import bits

Processors = Sequence[Callable[[Any, Tensor], Tensor]]

# The largest number of replays, and of uncaptured draws, that are compared if their results may vary.
RUNS = 5

# Processors with a cumulative sum. For a single row, a GPU may sum in a different order in every run.
VARYING = ("TopPLogitsWarper", "TypicalLogitsWarper")


class RecordedDraw(Recorded):
    """The recording of a draw from the logits of one recorded step.

    processors: logits processors that read nothing but the scores. `tensors`: the tokens, [B, 1] int64, and the
    probabilities, [B, V] fp32.
    """

    # The alarm of the recorded step already detects logits that are not finite.
    watched = 0

    def __init__(self, recorder: Recorder, step: RecordedStep, processors: Processors) -> None:
        logits = step.last_logits
        with torch.inference_mode(False), torch.no_grad():
            probabilities = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
            self._noise = torch.ones_like(probabilities)
            self._compared = torch.zeros((), dtype=torch.bool, device=logits.device)
            tokens = torch.empty((len(logits), 1), dtype=torch.int64, device=logits.device)

        names = {type(processor).__name__ for processor in processors}
        self._varies = logits.is_cuda and len(logits) == 1 and not names.isdisjoint(VARYING)

        def run(_: Sequence[Tensor]) -> Sequence[Tensor]:
            probabilities = probabilities_of(logits, processors)
            return _drawn(probabilities, self._noise, self._compared), probabilities

        super().__init__(recorder, Inputs((), ()), run, [tokens, probabilities])

    def draw(self, generator: torch.Generator | None = None) -> Tensor:
        """Replay for the step's last logits. Returns the tokens, [B, 1], valid until the next replay."""
        self._noise.exponential_(1, generator=generator)
        self._recording.replay()
        return self.tensors[0]

    def agrees(self, step: RecordedStep, processors: Processors) -> bool:
        """Return whether a replay draws the tokens that `torch.multinomial` draws from the same state of the generator.

        The probabilities must be bitwise equal too. If the results may vary, it is enough that one of a few replays
        equals one of a few uncaptured draws. Between two of these replays, the recording is replayed with other logits
        and other noise, so that a replay of stale logits does not count as equal.
        """
        # on a GPU, a failed assertion would end the process before a wrong draw could be rejected
        self._compared.fill_(True)
        try:
            return self._agrees(step, processors)
        finally:
            self._compared.fill_(False)

    def _agrees(self, step: RecordedStep, processors: Processors) -> bool:
        device, logits = self._noise.device, step.last_logits
        state = default_generator(device).get_state()
        replayed: list[list[Tensor]] = []
        uncaptured: list[list[Tensor]] = []
        for number in range(RUNS if self._varies else 1):
            own_generator, stock_generator = (torch.Generator(device).set_state(state) for _ in range(2))
            if number:
                self._replay_others(logits)
            self.draw(own_generator)
            replayed.append([tensor.clone() for tensor in self.tensors])
            probabilities = probabilities_of(logits, processors)
            tokens = torch.multinomial(probabilities, num_samples=1, generator=stock_generator)
            uncaptured.append([tokens, probabilities])
            if not torch.equal(own_generator.get_state(), stock_generator.get_state()):
                return False
            if any(all(map(_same, one, other)) for one in replayed for other in uncaptured):
                return True
        return False

    def _replay_others(self, logits: Tensor) -> None:
        """Replay with other logits and other noise, and restore the logits."""
        saved = logits.clone()
        logits.copy_(saved.roll(1, -1))
        self._noise.fill_(1)
        self._recording.replay()
        logits.copy_(saved)


def _same(one: Tensor, other: Tensor) -> bool:
    # bitwise, so that NaN equals NaN: a device without assertions also draws from probabilities that are NaN
    return torch.equal(bits(one), bits(other))


def probabilities_of(logits: Tensor, processors: Processors) -> Tensor:
    """The probabilities of the next token as transformers computes them, [B, V] fp32. logits: [B, V]."""
    return nn.functional.softmax(scores_of(logits, processors), dim=-1)


def scores_of(logits: Tensor, processors: Processors) -> Tensor:
    """The processed scores as transformers computes them, [B, V] fp32. logits: [B, V]."""
    scores = logits.to(copy=True, dtype=torch.float32)
    for processor in processors:
        scores = processor(None, scores)
    return scores


def _drawn(probabilities: Tensor, noise: Tensor, compared: Tensor) -> Tensor:
    """Check the probabilities and draw tokens, as `torch.multinomial` does after it has drawn this noise.

    compared: [] bool, whether the check is left to the uncaptured draw that this one is compared with.
    """
    low, high = torch.aminmax(probabilities)
    # `multinomial` also rejects a sum of 0, but the sum of a softmax with valid values is never 0.
    valid = (high < math.inf) & (low >= 0)
    torch._assert_async(valid | compared, "probability tensor contains either `inf`, `nan` or element < 0")
    return (probabilities / noise).argmax(dim=-1, keepdim=True)


@cache
def draws_like_multinomial(device: torch.device) -> bool:
    """Whether `torch.multinomial` draws on this device as `RecordedDraw` does. Does not use the default generator."""
    if not hasattr(torch, "_assert_async"):
        return False
    with torch.inference_mode(False), torch.no_grad():
        for rows, size in ((1, 7), (1, 5003), (64, 331)):
            own_generator, stock_generator = (torch.Generator(device).manual_seed(size) for _ in range(2))
            scores = torch.linspace(-4, 4, rows * size, device=device).cos().view(rows, size)
            probabilities = nn.functional.softmax(3 * scores, dim=-1)
            noise = torch.empty_like(probabilities).exponential_(1, generator=own_generator)
            drawn = _drawn(probabilities, noise, torch.zeros((), dtype=torch.bool, device=device))
            expected = torch.multinomial(probabilities, num_samples=1, generator=stock_generator)
            if not torch.equal(drawn, expected) or not torch.equal(
                own_generator.get_state(), stock_generator.get_state()
            ):
                return False
    return True
