"""The decode steps of one call to `generate`: run uncaptured at first, then recorded, compared and replayed.

A step without a recording runs uncaptured. The second step with the same key is recorded, and the following ones are
replayed. `schedule` decides when a replay is compared with an uncaptured step, `comparison` compares them, and
`rewind` handles a difference. No token comes from a replay before the first comparison has passed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hf_rocm.generation import comparison, decode_experts, incident, reordering
from hf_rocm.generation import recorder as recorders
from hf_rocm.generation.cache import DecodeCache
from hf_rocm.generation.cache_layer import reorder
from hf_rocm.generation.decide import refuses_hooks
from hf_rocm.generation.inputs import begin
from hf_rocm.generation.model_state import ModelState, examine, refuses_start
from hf_rocm.generation.rank_consensus import Agreement
from hf_rocm.generation.recorded_draw import RecordedDraw, probabilities_of
from hf_rocm.generation.recorded_step import Recorded, RecordedStep, drop_oldest
from hf_rocm.generation.recorder import Recorder
from hf_rocm.generation.residents import Source
from hf_rocm.generation.rewind import NOT_FINITE, Rewind
from hf_rocm.generation.schedule import BACK
from hf_rocm.generation.seen import seen_over, step_over
from hf_rocm.generation.state import State
from hf_rocm.generation.static_buffers import resident
from hf_rocm.generation.step import Inputs, Unrecordable, alike, first_line, put_together, take_apart
from hf_rocm.generation.token_choice import Choice
from hf_rocm.weights.shuffled_copy import counters_watched

# The largest number of recorded steps of one cache, not counting steps that verify drafts, and of recorded draws of one
# step. Every adapter and attention implementation needs separate recordings.
_MAX_RECORDINGS = 4

# The key of the recorder in the dict of recordings.
_RECORDER = "recorder"

_calls = itertools.count()

_log = logging.getLogger("hf_rocm")


class Runner:
    """Runs the steps of one call over one cache.

    probable: whether its recorded steps compute probabilities. early: whether `prepare` may examine the model.
    """

    def __init__(self, state: State, cache: DecodeCache, *, probable: bool = False, early: bool = False) -> None:
        self._state = state
        self._early = early
        self._probable = probable
        self.cache = cache
        # The model as the first step found it, and as `prepare` found it until then.
        self._start: ModelState | None = None
        self._prepared: ModelState | None = None
        self._model: Any
        # The experts implementation, and the number of switches when it was read.
        self._experts: str | None = None
        self._switches = 0
        # How many hooks this process had registered when the modules were last examined.
        self._hooks = cache.hooks
        self._ranks: Agreement
        # Whether every step of this call runs uncaptured.
        self._uncaptured = False
        # The keys of the steps so far.
        self._keys: set[Hashable] = set()
        self._call = next(_calls)
        # The number of replays since the call's last comparison, and since its last uncaptured step.
        self._unproven = self._in_a_row = 0
        # The arguments of the last step, if their tensors are resident.
        self._arguments: Mapping[str, Any] = {}
        self._inputs: Inputs | None = None
        # the last step whose outputs have a stand-in, and these outputs
        self._last: tuple[RecordedStep | None, Any] = None, None

    def __call__(self, model: Any, arguments: Mapping[str, Any]) -> Any:
        """Run or replay one step. Returns the outputs of `model(**arguments)`, in which the logits may be a stand-in.

        arguments: the keyword arguments of the model's forward, with the cache as `past_key_values`.
        """
        lookahead = self.cache.choice and self.cache.choice.lookahead
        launched = lookahead and lookahead.take(self.cache.length)
        if self._state.disabled is not None or self._uncaptured:
            return model(**arguments)
        tokens = 1 if self.cache.drafts is None else arguments["input_ids"].shape[1]
        if tokens > self.cache.longest_step:
            self._state.turn_away(f"a step verifies more than {self.cache.longest_step - 1} drafted tokens")
            return self._run(model, arguments)
        self.cache.aim(tokens)
        arguments = self.cache.step_arguments(arguments)
        inputs = self._inputs if alike(arguments, self._arguments) else None
        if inputs is None:
            try:
                inputs = self._inputs = take_apart(arguments, self.cache.constants)
            except Unrecordable as reason:
                self._state.turn_away(str(reason))
                return self._run(model, arguments)
            self._arguments = arguments if all(map(resident, inputs.tensors)) else {}
        if self._switches != self._state.switches:
            self._follow_switches(model)
        start = self._start or self._begin(model)
        if start is None:
            return model(**arguments)
        replaced = start.replaced()
        if replaced is not None:
            self._state.turn_away(f"{replaced} during a call")
            return self._run(model, arguments)
        if self._hooks != RemovableHandle.next_id and self._hooked(model):
            return self._run(model, arguments)
        key = (start.number, inputs.key)
        step: RecordedStep | None = self.cache.recordings.get(key)
        if step is not None:
            alarm = self._ranks.group is None and step.alarm.poll(step.schedule.replays)
            step.schedule.enter(self._call)
            if step.schedule.due or alarm:
                return self._compare(step, start, arguments, inputs)
            if launched is not step:
                step.replay(inputs.tensors)
            if self._arguments:
                seen_over(self.cache).record_replay(start.number, tokens, key)
            self._count(step)
            return self._outputs_of(step)
        if self._repeats(key):
            return self._record(key, model, arguments, inputs)
        return self._run(model, arguments)

    def _count(self, step: RecordedStep) -> None:
        """Count a replay that was not compared."""
        self.cache.advance()
        step.schedule.count()
        self._state.replayed += 1
        self._unproven += 1
        self._in_a_row += 1

    def _repeats(self, key: Hashable) -> bool:
        """Whether a step with this key has run before, which means that the shapes don't grow with every step.

        With drafts, it may have run in an earlier call: the last step of a call often has a unique number of drafts.
        """
        if self.cache.drafts is not None and self._arguments:
            return seen_over(self.cache).check_and_record(key)
        repeats = key in self._keys
        self._keys.add(key)
        return repeats

    def _outputs_of(self, step: RecordedStep) -> Any:
        """The outputs of a replayed step, with a stand-in for the logits where the choice of tokens is recorded."""
        choice = self.cache.choice
        if choice is None or step.tokens is None or self._ranks.group is not None or not choice.holds():
            return step.outputs(self.cache)
        last, outputs = self._last
        if last is not step:
            outputs = step.outputs(self.cache, logits=choice.stand_in(step, ref(self)))
            self._last = step, outputs
        return outputs

    def draw(self, step: RecordedStep, choice: Choice) -> Tensor:
        """Draw tokens from the last logits of a step, [B, 1]: uncaptured at first, then by a replay."""
        if choice.key not in step.draws:
            drop_oldest(step.draws, _MAX_RECORDINGS)
            step.draws[choice.key] = None
            # The draw has run before, in uncaptured steps, so only the recording failed.
            with suppress(Exception):
                step.draws[choice.key] = RecordedDraw(self._recorder(step.last_logits.device), step, choice.processors)
        recorded: RecordedDraw | None = step.draws[choice.key]
        if recorded is not None:
            recorded.schedule.enter(self._call)
            if not recorded.schedule.due:
                recorded.schedule.count()
                return recorded.draw()
            if not recorded.agrees(step, choice.processors):
                self._unproven = max(self._unproven, recorded.schedule.in_call)
                self._take_back(recorded, "a replayed draw was wrong", self._model, 0)
            recorded.schedule.agreed()
        return torch.multinomial(probabilities_of(step.last_logits, choice.processors), num_samples=1)

    @property
    def can_launch(self) -> bool:
        """Whether `launch` may replay a step."""
        return self._in_a_row > 0

    def launch(self, position: int | None, tokens: int, source: Source) -> tuple[RecordedStep, Tensor] | None:
        """Replay the next step before the loop has prepared it, if the loop's call would replay it; see `lookahead`.

        The arguments are those of `Step.begin`. Returns the step and its tokens on the device, [1, N]; None if nothing
        was replayed.
        """
        step = None if self._start is None else step_over(self.cache, self._start.number, tokens)
        if step is None or step.schedule.due_in(self._call):
            return None
        input_ids = begin(self.cache, position, tokens, source)
        if input_ids is None or not step.reads(input_ids):
            return None
        step.replay_in_place()
        return step, input_ids

    def may_advance(self, steps: Mapping[int, int]) -> bool:
        """Whether `advance` may replay the next steps. steps: maps numbers of tokens to the number of such steps."""
        start = self._start
        if start is None or self._uncaptured or self._state.disabled is not None or self._ranks.group:
            return False
        if self._switches != self._state.switches or self._hooks != RemovableHandle.next_id or start.replaced():
            return False
        for tokens, replays in steps.items():
            step = step_over(self.cache, start.number, tokens)
            if replays and (step is None or step.draft is None or step.schedule.due_in(self._call, replays)):
                return False
        return True

    def advance(self, position: int, tokens: int, source: Source) -> RecordedStep | None:
        """Replay the next step without transformers' loop, after `may_advance` has returned True.

        The arguments are those of `Step.begin`. Returns None if nothing was replayed, or if the alarm was triggered.
        """
        launched = self.launch(position, tokens, source)
        if launched is None:
            return None
        step, _ = launched
        step.schedule.enter(self._call)
        self._count(step)
        return None if step.alarm.poll(step.schedule.replays) else step

    def prepare(self, model: Any) -> None:
        """Examine the model while the device computes the prompt, if no user code runs before the first step."""
        if self._early and self._state.disabled is None:
            self._early, self._prepared = False, examine(model, self._state)

    def _begin(self, model: Any) -> ModelState | None:
        """Fingerprint the model at a call's first step, and again after its experts implementation has changed.

        Returns None if the steps of the call run uncaptured.
        """
        start, self._prepared = self._prepared, None
        if start is None or start.model is not model or start.switches != self._state.switches:
            start = examine(model, self._state)
        start = start._replace(number=self._state.number_of(start.fingerprint, probable=self._probable))
        self._start, self._model = start, model
        self._ranks = Agreement(model)
        self.cache.reorderer = WeakMethod(self._reorder)
        reason = refuses_start(start, self._state, self._ranks, len(self.cache.recordings))
        self._uncaptured = reason is not None
        if reason is not None:
            self._state.turn_away(reason)
        return None if self._uncaptured else start

    def _follow_switches(self, model: Any) -> None:
        """Discard the fingerprint if the experts implementation has changed, for example in another thread's call."""
        self._switches = self._state.switches
        experts = decode_experts.implementation(model)
        if experts != self._experts:
            self._experts, self._start = experts, None
            # The digests of the steps so far belong to another recording.
            self._in_a_row = 0

    def _hooked(self, model: Any) -> bool:
        """Whether a hook was registered on a module during the call, so that the rest of the call runs uncaptured.

        Does nothing with several ranks: if only one rank registered a hook, the others would wait for it forever.
        """
        self._hooks = RemovableHandle.next_id
        reason = None if self._ranks.group is not None else refuses_hooks(model)
        if reason is not None:
            self._state.turn_away(f"{reason}, registered during a call")
            self._uncaptured = True
        return self._uncaptured

    def _run(self, model: Any, arguments: Mapping[str, Any]) -> Any:
        self._in_a_row = 0
        return model(**arguments)

    def _record(self, key: Hashable, model: Any, arguments: Mapping[str, Any], inputs: Inputs) -> Any:
        """Run the step for its result, then record it. The next step with this key is the first replay."""
        cache = self.cache
        recorder = self._recorder(inputs.tensors[0].device)
        switches = self._state.switches
        cache.keep_states()
        outputs = self._run(model, arguments)
        after = cache.length
        step, failure = None, "another rank could not record it"
        try:
            with cache.being_recorded(), counters_watched():
                cache.rewind()
                step = RecordedStep(
                    recorder,
                    inputs,
                    lambda buffers: model(**put_together(arguments, buffers, cache.constants)),
                    outputs,
                    cache,
                    self._ranks.group,
                    probable=self._probable,
                )
        except Exception as error:  # noqa: BLE001  the step itself has just run, so its recording failed
            failure = first_line(error)
        finally:
            cache.level(after)
            cache.drop_states()
        if not self._ranks.all(step is not None) or step is None:
            self._state.disable(f"the step can't be recorded: {failure}")
            return outputs
        if not self._ranks.all(switches == self._state.switches):
            # The layers may have run different experts implementations; the next step is recorded.
            return outputs
        # Every number of drafts needs its own recording.
        drop_oldest(cache.recordings, _MAX_RECORDINGS + cache.longest_step - 1)
        cache.recordings[key] = step
        self._state.recorded, self._state.routes = self._state.recorded + 1, step.routes
        return outputs

    def _reorder(self, rows: Tensor) -> None:
        """Reorder the batch of the cache: uncaptured at first, then by a replay of the recorded reordering."""
        cache, state = self.cache, self._state
        if state.disabled is not None or self._uncaptured:
            return reorder(cache.rows_of_beams(), rows)
        step = reordering.recorded(cache, rows, self._recorder, self._ranks)
        if step is None:
            return None
        if isinstance(step, str):
            return state.disable(step)
        step.schedule.enter(self._call)
        agrees = step.agrees(cache, rows) if step.schedule.due else None
        step.replay((rows,))
        if agrees is None:
            step.schedule.count()
        elif self._ranks.all(agrees()):
            step.schedule.agreed()
        else:
            self._unproven = max(self._unproven, step.schedule.in_call)
            self._take_back(step, "a replayed reordering of the cache was wrong", self._model, 0)
        return None

    def _recorder(self, device: torch.device) -> Recorder:
        recorder: Recorder | None = self.cache.recordings.get(_RECORDER)
        if recorder is None:
            recorder = self.cache.recordings[_RECORDER] = recorders.factories[device.type](device)
        return recorder

    def _compare(self, step: RecordedStep, start: ModelState, arguments: Mapping[str, Any], inputs: Inputs) -> Any:
        """Replay the step and run it uncaptured. Returns the uncaptured result; the cache has its keys and values."""
        alarm = step.schedule.proven and not self._ranks.all(not step.alarm.triggered())
        model, unwritten = start.model, self._ranks.all(start.writes.none_since(start.model))
        reachable = min(self._in_a_row, comparison.reach(self.cache, arguments)) if unwritten else 0
        back = reachable if alarm else min(reachable, BACK)
        switches = self._state.switches
        result = comparison.compare(
            step, model, arguments, inputs, cache=self.cache, back=back, ranks=self._ranks, check_finite=alarm
        )
        if not result.agrees:
            if not result.intact or self._ranks.all(switches == self._state.switches):
                self._differs(step, result, model)
            # Some layers may have run another experts implementation; the next step is compared.
            self._in_a_row = 0
            return result.outputs
        if alarm and (back < self._unproven or result.finite):
            self._take_back(step, NOT_FINITE, model, result.operators)
        if not self._ranks.all(not step.alarm.triggered()):
            # The uncaptured steps also return values that are not finite.
            step.alarm.ignored = True
        if step.schedule.proven:
            self._state.replayed += 1
            self._state.compared += 1
        step.schedule.agreed()
        self._unproven = self._in_a_row = 0
        return result.outputs

    def _differs(self, step: RecordedStep, result: comparison.Comparison, model: Any) -> None:
        """Disable recording. Raises `Rewind` if the uncaptured results may depend on values that replays wrote."""
        rank = "" if not (result.agrees_here and result.intact) else " on another rank"
        difference = f"by up to {result.difference:.3g}" if result.intact else "and wrote to other rows of the cache"
        reason = f"a replayed step differed from the step itself{rank}, {difference}"
        if self._unproven or not result.intact:
            self._take_back(step, reason, model, result.operators)
        self._switch_off(step, reason, model, result.operators)

    def _take_back(self, step: Recorded, reason: str, model: Any, operators: int) -> None:
        self._switch_off(step, reason, model, operators)
        raise Rewind(reason, self._unproven, self._ranks)

    def _switch_off(self, step: Recorded, reason: str, model: Any, operators: int) -> None:
        schedule = step.schedule
        earlier = schedule.since - self._unproven
        if earlier > 0:
            message = "%s: tokens of earlier calls may be wrong too (replays that were not compared: up to %d)"
            _log.warning(message, self._state.name, earlier)
        self.cache.recordings.clear()
        incident.keep(model, reason=reason, operators=operators, replays=schedule.replays + 1, unproven=schedule.since)
        self._state.wrong_replay = reason
        self._state.disable(reason)
