"""A recorded step: the recording, the inputs that it reads, the outputs that it writes, and its alarm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_rocm import ops
from hf_rocm.generation import graph_teardown
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.recorder import Recorder, Recording
from hf_rocm.generation.schedule import BACK, Schedule
from hf_rocm.generation.static_buffers import resident
from hf_rocm.generation.step import Inputs, Unrecordable
from hf_rocm.ops.bits import add_doubt, append_digest, sum_of_bits
from hf_rocm.ops.finish_step import argmax


class Recorded:
    """One recording with its inputs and outputs, whose memory is outside the pool of recordings.

    All other memory of a recording belongs to the pool that all recordings of a device share. Another thread's
    recording may overwrite the pool as soon as a replay has ended, before this thread has read the outputs.

    run: the function to record; it takes the inputs and returns the output tensors. like: tensors with the
    shapes and dtypes of these outputs.
    """

    # How many outputs, from the first, raise the alarm if they are not finite; None: all.
    watched: int | None = None

    def __init__(
        self,
        recorder: Recorder,
        inputs: Inputs,
        run: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        like: Sequence[Tensor],
    ) -> None:
        # Inference tensors can't be written outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            buffers = [tensor if resident(tensor) else tensor.clone() for tensor in inputs.tensors]
            self.tensors = self._empty_like(like)
            self.alarm = Alarm((*buffers, *like)[0].device)
            self._warm_up(like)

        self._inputs = buffers
        self._changing = [index for index, buffer in enumerate(buffers) if buffer is not inputs.tensors[index]]
        self.schedule = Schedule()
        self._recording: Recording
        with ops.recording(this_thread=True) as routes:
            self._recording, _ = recorder.record(lambda: self._write(run(buffers)))
        # One route for every operation and tier.
        self.routes = {(route.operation, route.tier): route for route in routes}.values()

    def _empty_like(self, like: Sequence[Tensor]) -> list[Tensor]:
        """The memory of the outputs. like: as in `__init__`."""
        return [torch.empty_like(tensor) for tensor in like]

    def _warm_up(self, like: Sequence[Tensor]) -> None:
        """Called before the recording. like: as in `__init__`; for a `RecordedStep`, an uncaptured run's outputs."""

    def _write(self, outputs: Sequence[Tensor]) -> None:
        """Copy the outputs to their memory and check them. This is a part of the recorded work."""
        self._copy(self.tensors, outputs)

    def _copy(self, destinations: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for destination, tensor in zip(destinations, outputs, strict=True):
            destination.copy_(tensor)
        self.alarm.watch(destinations[: self.watched])

    @property
    def proved(self) -> bool:
        """Whether a replay has been compared with the uncaptured step and agreed."""
        return self.schedule.proven

    @property
    def nbytes(self) -> int:
        """The size of the inputs that the recording reads and of its outputs, in bytes."""
        return sum(tensor.nbytes for tensor in (*self._inputs, *self.tensors))

    def reads(self, tensor: Tensor) -> bool:
        """Whether the recording reads this tensor."""
        return any(buffer is tensor for buffer in self._inputs)

    def replay(self, tensors: Sequence[Tensor]) -> None:
        """Copy these inputs to the tensors that the recording reads, and replay it."""
        for index in self._changing:
            self._inputs[index].copy_(tensors[index])
        self._recording.replay()

    def replay_in_place(self) -> None:
        """Replay without copying inputs: with those of the last replay, or with resident inputs that were set since."""
        self._recording.replay()


def drop_oldest(recordings: dict[Any, Any], limit: int) -> None:
    """Delete the oldest recordings of this dict, so that at most `limit` remain after one more is added.

    Other entries remain.
    """
    steps = [key for key, recording in recordings.items() if isinstance(recording, Recorded)]
    for oldest in steps[: max(0, len(steps) + 1 - limit)]:
        del recordings[oldest]


class RecordedStep(Recorded):
    """A recorded decode step that uses a cache.

    like: an output of the step. group: the process group whose collectives the step contains, or None. digests:
    [BACK + 1] int64, the digests of the last replays' outputs, newest last. tokens: the tokens with the
    largest logits, or None (see `largest`); last_tokens: [B], those of the last position, or None. draft: [2] int64,
    the last of the tokens and, in the lower half of the second number, its probability in fp32; None unless `probable`.
    draws: the recorded draws from the step's logits (see `recorded_draw`).
    """

    def __init__(
        self,
        recorder: Recorder,
        inputs: Inputs,
        run: Callable[[Sequence[Tensor]], Any],
        like: Any,
        cache: DecodeCache,
        group: Any,
        *,
        probable: bool = False,
    ) -> None:
        device, tokens = inputs.tensors[0].device, largest(like)
        with torch.inference_mode(False), torch.no_grad():
            self.digests = torch.zeros(BACK + 1, dtype=torch.int64, device=device)
            self.tokens = self.last_tokens = self.draft = None
            if tokens is not None:
                numbers = tokens.new_empty(tokens.numel() + 1)
                self.tokens = numbers[:-1].view(tokens.shape)
                self.last_tokens = self.tokens[:, -1]
                self.draft = numbers[-2:] if probable else None
        self.draws: dict[Any, Any] = {}
        self._names = [name for name, value in like.items() if _written(value)]
        super().__init__(recorder, inputs, lambda buffers: tensors_of(run(buffers)), tensors_of(like))
        if group is not None:
            graph_teardown.watch(self._recording, cache, group)
        # omit the cache from the stored output: the cache references this object, which would create a reference cycle
        self._kind = type(like)
        self._cached = [name for name, value in like.items() if value is cache]
        self._fields = {name: None if value is cache else value for name, value in like.items()}
        self._fields |= zip(self._names, self.tensors, strict=True)

    def _warm_up(self, like: Sequence[Tensor]) -> None:
        # The first run selects and compiles kernels.
        self._write(like)
        self.digests.zero_()
        self.alarm.number.zero_()

    def _write(self, outputs: Sequence[Tensor]) -> None:
        destinations, outputs = [*self.tensors], [*outputs]
        if self.tokens is None:
            self._copy(destinations, outputs)
            append_digest(self.digests, sum_of_bits(outputs))
            return
        index = self._names.index("logits")
        out, logits = destinations.pop(index), outputs.pop(index)
        self._copy(destinations, outputs)
        further = sum_of_bits(outputs) if outputs else None
        probability = None if self.draft is None else self.draft.view(torch.float32)[2:3]
        ops.finish_step(logits, out, self.tokens, self.digests, self.alarm.number, further, probability)

    @property
    def logits(self) -> Tensor:
        """The logits of every token, [B, N, V], valid until the next replay."""
        logits = _logits(dict(zip(self._names, self.tensors, strict=True)))
        assert logits is not None
        return logits

    @property
    def last_logits(self) -> Tensor:
        """The logits of the last token, [B, V], valid until the next replay."""
        return self.logits[:, -1]

    def tokens_agree(self) -> bool:
        """Return whether the last replay chose the tokens with the largest of its logits."""
        return self.tokens is None or torch.equal(self.tokens, self.logits.argmax(dim=-1))

    def outputs(self, cache: DecodeCache, **replacements: Any) -> Any:
        """The step's output. Its tensors are valid until the next replay; transformers copies the logits.

        replacements: values that replace the fields with these names.
        """
        return self._kind(**{**self._fields, **dict.fromkeys(self._cached, cache), **replacements})


class Alarm:
    """Records on the device whether a replay has returned outputs that are not finite.

    The recorded step adds 0 to `number` if its outputs are finite, else another number or NaN, at no cost on the host.
    At every eighth replay, the host reads the previous copy of `number` from pinned memory and starts another copy, so
    it never waits. Comparisons and the end of a call read `number` itself.
    """

    EVERY = 8

    def __init__(self, device: torch.device) -> None:
        # True if the model's own outputs are not finite.
        self.ignored = False
        self.number = torch.zeros((), dtype=torch.float32, device=device)
        self._sent = torch.zeros((), dtype=torch.float32, pin_memory=device.type == "cuda")

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Check the outputs [..., V] that have a floating-point dtype. Runs within the recorded step."""
        for output in outputs:
            if output.is_floating_point():
                add_doubt(self.number, output)

    def poll(self, replays: int) -> bool:
        """Whether a replay up to the previous copy raised the alarm; False between copies. Does not wait.

        replays: the number of replays so far.
        """
        if self.ignored or replays % self.EVERY:
            return False
        was_triggered = bool(self._sent != 0)
        self._sent.copy_(self.number, non_blocking=True)
        return was_triggered

    def triggered(self) -> bool:
        """Return whether any replay so far raised the alarm. Waits for the device."""
        return not self.ignored and bool(self.number != 0)


def largest(outputs: Mapping[str, Any]) -> Tensor | None:
    """The tokens with the largest logits of a step, [B, N] int64, as transformers chooses them, or None."""
    logits = _logits(outputs)
    return None if logits is None else argmax(logits)


def _logits(outputs: Mapping[str, Any]) -> Tensor | None:
    """The logits of a step, [B, N, V], or None if there are none of this shape or if they are fp64.

    transformers converts them to fp32, which preserves the order of values in all dtypes except fp64.
    """
    logits = outputs.get("logits")
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.dtype == torch.float64:
        return None
    return logits


def digest(tensors: Sequence[Tensor], tokens: Tensor | None) -> Tensor:
    """A digest of the tensors that a step writes and of the tokens with the largest logits, [1] int64."""
    return sum_of_bits([*tensors, *([] if tokens is None else [tokens])])


def tensors_of(outputs: Any) -> list[Tensor]:
    """The tensors that a step writes, without those of its cache and resident ones.

    Raises `Unrecordable` if the output has a value that is not a tensor, None or the cache.
    """
    tensors = []
    for name, value in outputs.items():
        if _written(value):
            tensors.append(value)
        elif not isinstance(value, Tensor) and not (value is None or isinstance(value, DecodeCache)):
            raise Unrecordable(f"the step returns {name} as {type(value).__name__}")
    return tensors


def _written(value: Any) -> bool:
    """Return whether a step writes this part of its output; resident tensors are inputs that it returns unchanged."""
    return isinstance(value, Tensor) and resident(value) is None
