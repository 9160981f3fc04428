"""Recorded forwards. A recording takes the path of an uncaptured forward, with which its replays are compared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hf_rocm import patches
from hf_rocm.forwards.host_reads import Read, Reads, StoredValues
from hf_rocm.forwards.outputs import Outputs
from hf_rocm.forwards.padding import Padded
from hf_rocm.generation.comparison import RUNS, Operators, agree
from hf_rocm.generation.recorded_step import Recorded
from hf_rocm.generation.recorder import Recorder
from hf_rocm.generation.step import Inputs, Unrecordable
from hf_rocm.ops.captured import as_captured, in_captured_block
from hf_rocm.patches import Change

Run = Callable[[Sequence[Tensor]], Any]


class Observed(NamedTuple):
    """An uncaptured forward: its output, the values read on the host, and why it can't be recorded, or None."""

    output: Any
    reads: list[Read]
    reason: str | None


def observe(run: Run, inputs: Inputs, weights: Sequence[Tensor]) -> Observed:
    """Run a forward uncaptured, along the path that its recording will take."""
    device = inputs.tensors[0].device
    before = _random_state(device)
    with recordable(), Reads(inputs.tensors, weights) as reads:
        output = run(inputs.tensors)
    reads.finish()
    drawn = not torch.equal(before, _random_state(device))
    return Observed(output, reads.reads, reads.reason or ("it draws random numbers" if drawn else None))


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class Arena:
    """Memory for outputs that are valid only until the next replay, shared by the recordings of one model.

    The lengths of prompts differ, so a buffer has a power of two of elements. It is freed with its last recording.
    last: the stream of the last recording or replay, which may still read the buffers, or None.
    """

    def __init__(self) -> None:
        self.last: Any = None
        self._buffers: WeakValueDictionary[Hashable, _Buffer] = WeakValueDictionary()

    def like(self, index: int, tensor: Tensor) -> tuple[Tensor, _Buffer]:
        """Return dense memory for output number `index` with the shape and dtype of this tensor, and its buffer."""
        elements = 1 << max(0, tensor.numel() - 1).bit_length()
        key = index, elements, tensor.dtype, tensor.device
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = _Buffer(tensor.new_empty(elements))
        return buffer.tensor[: tensor.numel()].view(tensor.shape), buffer

    @property
    def nbytes(self) -> int:
        return sum(buffer.tensor.nbytes for buffer in self._buffers.values())

    def enter_stream(self, device: torch.device) -> None:
        """Make the current stream wait for the work that uses the buffers so far, and use them from now on."""
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            if self.last is not None and self.last != stream:
                stream.wait_stream(self.last)
            self.last = stream


class _Buffer:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class RecordedForward(Recorded):
    """A recorded forward; see `Recorded`.

    run: runs the forward on given inputs. observed: an uncaptured run. owned: see `runner.Kind`. arena: the memory of
    the other outputs.
    """

    def __init__(
        self,
        recorder: Recorder,
        inputs: Inputs,
        run: Run,
        observed: Observed,
        weights: Sequence[Tensor],
        *,
        arena: Arena,
        owned: str | None = None,
    ) -> None:
        if owned is not None:
            self.watched = len(Outputs(observed.output[owned], inputs.tensors, weights).tensors)
        self._arena = arena
        self._buffers: list[_Buffer] = []
        outputs = Outputs(observed.output, inputs.tensors, weights)
        if not outputs.tensors:
            raise Unrecordable("it returns no tensor")

        def tensors(buffers: Sequence[Tensor]) -> list[Tensor]:
            with recordable(), StoredValues(read.value for read in observed.reads) as values:
                output = run(buffers)
            values.finish()
            return Outputs(output, buffers, weights).tensors

        arena.enter_stream(outputs.tensors[0].device)
        super().__init__(recorder, inputs, tensors, outputs.tensors)
        self._weights = weights
        self._build = outputs.build
        # The cuts of a padded call; see `padding.Padded.cuts`.
        self.cuts: Sequence[tuple[int, ...]] | None = None

    def _empty_like(self, like: Sequence[Tensor]) -> list[Tensor]:
        owned = super()._empty_like(like[: self.watched])
        shared = [self._arena.like(len(owned) + index, tensor) for index, tensor in enumerate(like[len(owned) :])]
        self._buffers = [buffer for _, buffer in shared]
        return owned + [tensor for tensor, _ in shared]

    @property
    def nbytes(self) -> int:
        """The size of the inputs and the owned outputs. `Arena.nbytes` is that of the other outputs."""
        return sum(tensor.nbytes for tensor in (*self._inputs, *self.tensors[: self.watched]))

    @property
    def shared_nbytes(self) -> int:
        """The size of the buffers of the arena that this recording uses."""
        return sum(buffer.tensor.nbytes for buffer in self._buffers)

    def copies(self, inputs: Sequence[Tensor], padded: Padded | None = None) -> list[Tensor]:
        """Replay with these inputs. Returns the tensors of the output; no later replay changes the owned ones.

        padded: the padded form of the call, if any; the padding is then cut off.
        """
        self._arena.enter_stream(self.tensors[0].device)
        self.replay(inputs)
        tensors: Sequence[Tensor] = self.tensors
        if padded is not None and self.cuts is not None:
            tensors = padded.cut(tensors, self.cuts)
        owned = tensors[: self.watched]
        return [tensor.clone() for tensor in owned] + [*tensors[len(owned) :]]

    def output(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """Build the output of the forward with these tensors."""
        return self._build(tensors, inputs)

    def compare(self, run: Run, inputs: Inputs) -> Compared:
        """Replay the forward and compare it with an uncaptured run along the same path.

        If the two differ, the uncaptured run is repeated: once, or up to `RUNS` runs in total if its results vary.
        """
        replayed = self.copies(inputs.tensors)
        runs: list[list[Tensor]] = []
        output: Any = None
        agrees, difference, operators = False, 0.0, 0
        for number in range(RUNS):
            with recordable(), Operators() if number else _nothing() as counted:
                output = run(inputs.tensors)
            operators = getattr(counted, "count", 0)
            runs.append(Outputs(output, inputs.tensors, self._weights).tensors)
            agrees, difference, noise = agree(replayed, runs)
            if agrees or (number and not noise):
                break
        return Compared(output, agrees, difference, operators)

    def wait(self) -> None:
        """Wait for the last replay, so that its memory can be freed."""
        if self._arena.last is not None:
            self._arena.last.synchronize()


class Compared(NamedTuple):
    """The result of a comparison.

    output: the output of the uncaptured forward. operators: the number of operators that it ran; 0 if they were not
    counted.
    """

    output: Any
    agrees: bool
    difference: float
    operators: int


@contextmanager
def recordable() -> Iterator[None]:
    """Within the block, this thread's forwards take the same path, whether or not they are recorded.

    While a stream is being captured, transformers takes another path: masks that hide nothing are kept, since their
    values can't be read. In this block the values are known, so the path is that of an uncaptured forward.
    transformers' warning about padding without a mask is disabled in the block.
    """
    from transformers import PreTrainedModel
    from transformers.utils import import_utils

    changes = []
    if hasattr(import_utils, "is_cuda_stream_capturing"):
        changes.append(Change(import_utils, "is_cuda_stream_capturing", _unless_recordable(False), key=__name__))
    warning = "warn_if_padding_and_no_attention_mask"
    if hasattr(PreTrainedModel, warning):
        changes.append(Change(PreTrainedModel, warning, _unless_recordable(None), key=__name__))
    with patches.applied(*changes), as_captured():
        yield


def _unless_recordable(value: Any) -> Callable[[Change], Any]:
    def make(change: Change) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            if change.live and in_captured_block():
                return value
            return change.original(*args, **kwargs)

        return function

    return make


@contextmanager
def _nothing() -> Iterator[None]:
    yield
