"""Replay faults, such as those reported for HIP graphs, injected into steps that are recorded on a CPU."""

from __future__ import annotations

import torch

from tests.generation.emulator import EmulatedRecorder


def recorder_with(fault, *, first, last=10**9, reorderings=False, draws=False):
    """A recorder class whose replays `first` to `last`, counted from 1, have this fault.

    reorderings: the fault is in the reordering of a cache for beams, not in a step. draws: the fault is in the draw of
    a token, not in a step.
    """

    class Faulty(EmulatedRecorder):
        def record(self, run):
            recording, result = super().record(run)
            correct, replay, memory = recording.kept, recording.replay, {}
            if (reorderings, draws) != (_reorders(correct), _draws(correct)):
                return recording, result

            def faulty_replay():
                # `fault` is called in every replay, because it may use earlier inputs.
                faulty = fault(list(correct), memory)
                if first <= recording.replays + 1 <= last:
                    recording.kept = faulty
                try:
                    replay()
                finally:
                    recording.kept = correct

            recording.replay = faulty_replay
            return recording, result

    return Faulty


def _reorders(kept):
    return all("index_select" in str(operator) or "copy_" in str(operator) for operator, *_ in kept)


def _draws(kept):
    return any("aminmax" in str(operator) for operator, *_ in kept)


def stale_input(kept, memory):
    """The step reads the token of the previous replay."""
    return _stale(kept, memory, "embedding", argument=1)


def stale_mask(kept, memory):
    """Attention reads the mask of the previous replay."""
    return _stale(kept, memory, "aten.where")


def stale_positions(kept, memory):
    """The rotary embedding reads the positions of the previous replay."""
    return _stale(kept, memory, "aten._to_copy")


def stale_pointer(kept, memory):
    """A GEMM reads an old value of its input."""
    index = _last(kept, "aten.mm")
    operator, (rows, *rest), kwargs, outputs = kept[index]
    old = memory.setdefault("rows", rows.clone())
    kept[index] = (operator, (old, *rest), kwargs, outputs)
    return kept


def node_dropped(kept, memory):
    """The values of the last layer are not written."""
    del kept[_last(kept, "index_copy_")]
    return kept


def gemm_dropped(kept, memory):
    """A GEMM doesn't run: later operators read its result from an earlier replay."""
    del kept[_first(kept, "aten.mm")]
    return kept


def writes_reordered(kept, memory):
    """Keys are written after attention has read them."""
    kept.append(kept.pop(_first(kept, "index_copy_")))
    return kept


def garbage(kept, memory):
    """The result of a GEMM is wrong."""
    return _spoiled(kept, "aten.mm", lambda result: result.roll(1, -1).mul(-3))


def garbage_logits(kept, memory):
    """The result of the last GEMM is wrong; the cache is correct."""
    return _spoiled(kept, "aten.mm", lambda result: result.roll(1, -1).mul(-3), position=-1)


def garbage_in_the_cache(kept, memory):
    """The logits are correct, but the values of the last layer are wrong."""
    index = _last(kept, "index_copy_")
    operator, (buffer, dim, place, value), _, outputs = kept[index]
    kept.append((lambda: operator(buffer, dim, place, value.roll(1, -1)), (), {}, outputs))
    return kept


def stray_write(kept, memory):
    """The new keys are also written to the first position of the buffer."""
    index = _first(kept, "index_copy_")
    operator, (buffer, dim, place, value), kwargs, outputs = kept[index]
    kept.append((operator, (buffer, dim, torch.zeros_like(place), value), kwargs, outputs))
    return kept


def not_finite(kept, memory):
    """The results of the first GEMM are NaN."""
    return _spoiled(kept, "aten.mm", lambda result: result * float("nan"))


def not_finite_logits(kept, memory):
    """The results of the last GEMM are NaN; the cache is correct."""
    return _spoiled(kept, "aten.mm", lambda result: result * float("nan"), position=-1)


def argmax_dropped(kept, memory):
    """The tokens with the largest logits are those of an earlier replay."""
    del kept[_last(kept, "aten.argmax")]
    return kept


def stale_logits(kept, memory):
    """A draw reads the logits of the previous replay."""
    return _stale(kept, memory, "aten._to_copy")


def filter_dropped(kept, memory):
    """The filter of a processor doesn't run: later operators read its result from an earlier replay."""
    del kept[_first(kept, "aten.masked_fill")]
    return kept


def garbage_draws(kept, memory):
    """The ratio of probabilities to noise is wrong."""
    return _spoiled(kept, "aten.div", lambda result: result.roll(1, -1), position=-1)


def copy_dropped(kept, memory):
    """The keys of the last layer are not reordered."""
    del kept[_all(kept, "aten.copy_")[-2]]
    return kept


def stale_order(kept, memory):
    """The values of the last layer are reordered as in the previous replay."""
    index = _last(kept, "index_select")
    operator, (keys, dim, rows), kwargs, outputs = kept[index]
    before, memory["rows"] = memory.get("rows", rows.clone()), rows.clone()
    kept[index] = (operator, (keys, dim, before), kwargs, outputs)
    return kept


def _stale(kept, memory, name, argument=0):
    """The first operator of this name reads an argument as it was in the previous replay."""
    index = _first(kept, name)
    operator, args, kwargs, outputs = kept[index]
    args = list(args)
    current = args[argument].clone()
    args[argument], memory[name] = memory.get(name, current), current
    kept[index] = (operator, tuple(args), kwargs, outputs)
    return kept


def _spoiled(kept, name, spoil, position=0):
    index = _all(kept, name)[position]
    operator, args, kwargs, outputs = kept[index]
    kept[index] = (lambda *args, **kwargs: spoil(operator(*args, **kwargs)), args, kwargs, outputs)
    return kept


def _first(kept, name):
    return _all(kept, name)[0]


def _last(kept, name):
    return _all(kept, name)[-1]


def _all(kept, name):
    indices = [index for index, (operator, *_) in enumerate(kept) if name in str(operator)]
    assert indices, f"the step has no {name}"
    return indices
