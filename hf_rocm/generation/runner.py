"""Decode steps of one `generate`: the first few run as ever, then one is recorded, checked and replayed.

A step takes one of four ways, in this order as a call goes on: uncaptured, because nothing like it was seen before;
uncaptured, and then recorded; replayed *and* run uncaptured on the same state, to compare the two; replayed. Whatever
a recording wasn't made for starts again at the first. Until a recording has been checked no token comes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_rocm.generation import ending
from hf_rocm.generation import recorder as recorders
from hf_rocm.generation.agreement import Agreement
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.fingerprint import fingerprint
from hf_rocm.generation.recorder import Recorder, Recording
from hf_rocm.generation.resident import resident
from hf_rocm.generation.state import State
from hf_rocm.generation.step import Inputs, Unrecordable, put_together, take_apart
from hf_rocm.weights.kept import counters_watched

# Recordings of one cache: another adapter, another implementation of attention.
_MOST = 4

_RECORDER = "recorder"

# How far apart two runs of the same kernels may be, in units of the largest value's rounding: sums in another order.
_ROUNDINGS = 16


class Runner:
    """Runs the steps of one call over one cache."""

    def __init__(self, state: State, cache: DecodeCache) -> None:
        self._state = state
        self.cache = cache
        self._model_as_found: int | None = None
        self._ranks: Agreement
        self._apart = False
        self._last: Hashable = None

    def __call__(self, model: Any, arguments: Mapping[str, Any]) -> Any:
        """The step's output, as `model(**arguments)` would give it.

        model: the model itself, whose hooks run. arguments: keyword arguments, with the cache as `past_key_values`.
        """
        if self._state.disabled is not None or self._apart:
            return model(**arguments)
        self.cache.aim()
        try:
            inputs = take_apart(arguments, (self.cache,))
        except Unrecordable as reason:
            self._state.turn_away(str(reason))
            return model(**arguments)
        if self._model_as_found is None:
            self._model_as_found = self._state.number_of(fingerprint(model))
            self._ranks = Agreement(model)
            self._apart = not self._ranks.same(self._model_as_found, len(self.cache.recordings))
            if self._apart:
                self._state.start_over()  # on all of them: from here on they count alike again
                self._state.turn_away("the ranks found their models in different states")
                return model(**arguments)
        key = (self._model_as_found, inputs.key)
        held: _Held | None = self.cache.recordings.get(key)
        if held is not None and held.proved:
            held.replay(inputs.tensors)
            self.cache.advance()
            self._state.replayed += 1
            return held.outputs(self.cache)
        if held is not None:
            return self._prove(held, model, arguments, inputs)
        if key == self._last:
            return self._record(key, model, arguments, inputs)
        self._last = key  # seen twice in a row, its shapes don't grow with every step
        return model(**arguments)

    def _record(self, key: Hashable, model: Any, arguments: Mapping[str, Any], inputs: Inputs) -> Any:
        """Run the step for its result, then record it; the next step like it is the first that is replayed."""
        cache = self.cache
        recorder = self._recorder(inputs)
        outputs = model(**arguments)
        after = cache.length
        cache.rewind()
        held, failure = None, "another rank could not record it"
        try:
            with cache.being_recorded(), counters_watched():
                held = _Held(
                    recorder,
                    inputs,
                    lambda own: model(**put_together(arguments, own, (cache,))),
                    outputs,
                    cache,
                    self._ranks.group,
                )
        except Exception as error:  # noqa: BLE001  it ran a moment ago: what it says now is that it can't be recorded
            failure = _first_line(error)
        finally:
            cache.level(after)
        if not self._ranks.all(held is not None) or held is None:
            self._state.disable(f"the step can't be recorded: {failure}")
            return outputs
        for oldest in [each for each in cache.recordings if each != _RECORDER][: 1 - _MOST]:
            del cache.recordings[oldest]
        cache.recordings[key] = held
        self._state.recorded += 1
        return outputs

    def _prove(self, held: _Held, model: Any, arguments: Mapping[str, Any], inputs: Inputs) -> Any:
        """Replay the step and run it uncaptured, on the same state. The latter's result counts, and what it wrote."""
        cache = self.cache
        held.replay(inputs.tensors)
        cache.advance()
        runs = [[each.clone() for each in held.tensors] + cache.written()]
        for _ in range(2):
            cache.rewind()
            outputs = model(**arguments)
            runs.append([each.clone() for each in _tensors_of(outputs)] + cache.written())
            if self._ranks.all(all(torch.equal(one, other) for one, other in zip(*runs[-2:], strict=True))):
                break
        agrees, difference = _agree(*runs)
        held.proved = self._ranks.all(agrees)
        if not held.proved:
            cache.recordings.clear()
            where = "" if not agrees else " on another rank"
            self._state.disable(f"a replayed step differed from the step itself{where}, by up to {difference:.3g}")
        return outputs

    def _recorder(self, inputs: Inputs) -> Recorder:
        held: Recorder | None = self.cache.recordings.get(_RECORDER)
        if held is None:
            device = inputs.tensors[0].device
            held = self.cache.recordings[_RECORDER] = recorders.factories[device.type](device)
        return held


class _Held:
    """A recording, the inputs that it reads and the outputs that it fills.

    Both are its own. What else a recording works with lies in memory that all recordings of a device share, and may be
    another one's as soon as a replay has ended: another thread's, before this one has read what the step returned.
    like: what the step returns.
    """

    def __init__(
        self,
        recorder: Recorder,
        inputs: Inputs,
        run: Callable[[Sequence[Tensor]], Any],
        like: Any,
        cache: DecodeCache,
        group: Any,
    ) -> None:
        with torch.inference_mode(False), torch.no_grad():  # else they could not be written to outside of it
            own = [each if resident(each) else each.clone() for each in inputs.tensors]
            self.tensors = [torch.empty_like(each) for each in _tensors_of(like)]

        def step() -> None:
            for place, each in zip(self.tensors, _tensors_of(run(own)), strict=True):
                place.copy_(each)

        self._own = own
        self._changing = [index for index, each in enumerate(own) if each is not inputs.tensors[index]]
        self.proved = False
        self._recording: Recording
        self._recording, _ = recorder.record(step)
        if group is not None:
            ending.watch(self._recording, cache, group)
        # without the cache, which holds us: both are to go as soon as nobody needs them
        self._kind = type(like)
        places = iter(self.tensors)
        self._fields = {name: next(places) if isinstance(each, Tensor) else None for name, each in like.items()}
        self.cached = [name for name, each in like.items() if each is cache]

    def replay(self, tensors: Sequence[Tensor]) -> None:
        """Run the step on these inputs: they are copied to where it reads them."""
        for index in self._changing:
            self._own[index].copy_(tensors[index])
        self._recording.replay()

    def again(self) -> None:
        """Run the step once more on what it read last: it writes what it wrote then. For a clock."""
        self._recording.replay()

    def outputs(self, cache: DecodeCache) -> Any:
        """What the step returns. The tensors are good until its next replay; transformers copies the logits."""
        return self._kind(**{**self._fields, **dict.fromkeys(self.cached, cache)})


def _tensors_of(outputs: Any) -> list[Tensor]:
    """A step's outputs; a cache beside them is compared by its rows."""
    found = []
    for name, each in outputs.items():
        if isinstance(each, Tensor):
            found.append(each)
        elif not (each is None or isinstance(each, DecodeCache)):
            raise Unrecordable(f"the step returns {name} as a {type(each).__name__}")
    return found


def _agree(replayed: list[Tensor], run: list[Tensor], again: list[Tensor] | None = None) -> tuple[bool, float]:
    """Whether a replay is as near to the step as the step to itself, and how far off the worst tensor is.

    again: the step once more, if the replay was not equal to its first run. What is computed by the same kernels is
    equal to the bit, unless they add up in an order of their own: then each tensor may be off by twice as much. What
    differs by more than rounding from one run to the next can't be checked, and doesn't agree.
    """
    if again is None:
        return True, 0.0
    worst, agree = 0.0, True
    for one, two, three in zip(replayed, run, again, strict=True):
        off, noise = (float((two - each).abs().max().float()) for each in (one, three))
        rounding = _ROUNDINGS * torch.finfo(two.dtype).eps * float(two.abs().max().float())
        agree = agree and off <= 2 * noise and noise <= rounding  # also false for what is not a number
        worst = max(worst, off)
    return agree, worst


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
