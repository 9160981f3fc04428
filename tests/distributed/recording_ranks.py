"""Record decode steps of a sharded model on a CPU. test_recorded_steps.py runs this script in each of two ranks.

Argument: a checkpoint. Prints a line of JSON: check → error, or "".
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import transformers
from torch.distributed import destroy_process_group
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

import hf_rocm
from hf_rocm.errors import GraphError
from hf_rocm.generation import graph_teardown, recorder
from hf_rocm.generation.recorded_step import RecordedStep
from hf_rocm.generation.state import known
from tests.generation import emulator

transformers.logging.set_verbosity_error()
RANK = 0


class EmulatedRecorder(emulator.EmulatedRecorder):
    """Also records all-reduces, which PyTorch doesn't pass to a dispatch mode."""

    def record(self, run):
        reduce = dist.all_reduce
        with emulator.Operators() as recording:

            def all_reduce(tensor, *args, **kwargs):
                recording.kept.append((Reduction(reduce), (tensor, *args), kwargs, []))
                return reduce(tensor, *args, **kwargs)

            dist.all_reduce = all_reduce
            try:
                result = run()
            finally:
                dist.all_reduce = reduce
        return recording, result


class Reduction:
    namespace = "c10d"

    def __init__(self, reduce):
        self.reduce = reduce

    def __call__(self, *args, **kwargs):
        self.reduce(*args, **kwargs)


def load(checkpoint, **settings):
    return hf_rocm.from_pretrained(checkpoint, tp_plan="auto", force=True, **settings).eval()


def generate(model, new=12):
    ids = torch.tensor([[5, 9, 31, 7], [3, 44, 8, 21]])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False).tolist()


def tokens_equal_stock(checkpoint):
    stock = transformers.LlamaForCausalLM.from_pretrained(checkpoint, tp_plan="auto").eval()
    prepared = load(checkpoint, graphs=True)
    assert generate(prepared) == generate(stock)
    assert generate(prepared, new=8) == generate(stock, new=8)
    state = known(prepared)
    assert (state.recorded, state.replayed) == (1, 11 - 3 + 7), (state.recorded, state.replayed)


def enabled_unless_switched_off(checkpoint):
    model = load(checkpoint)
    generate(model)
    assert known(model).recorded == 1
    model = load(checkpoint, graphs=False)
    generate(model)
    assert known(model) is None


def refuses_a_backend_that_cannot_be_recorded(checkpoint):
    model = load(checkpoint, graphs=True)
    before = recorder.collectives.pop("cpu")
    try:
        assert "communicate through gloo, whose collectives can't be recorded" in refused(model)
    finally:
        recorder.collectives["cpu"] = before


def refused(model):
    try:
        generate(model)
    except GraphError as error:
        return str(error)
    raise AssertionError("it was recorded")


def all_ranks_stop_if_one_cannot_record(checkpoint):
    model = load(checkpoint, graphs=True)
    record = EmulatedRecorder.record

    def fails(self, run):
        record(self, run)
        raise RuntimeError("no memory for this")

    if RANK == 1:
        EmulatedRecorder.record = fails
    try:
        words = refused(model)
    finally:
        EmulatedRecorder.record = record
    assert ("no memory for this" if RANK == 1 else "another rank could not record it") in words, words


def all_ranks_stop_if_one_replays_something_else(checkpoint):
    model = load(checkpoint, graphs=True)
    record = EmulatedRecorder.record

    def wrong(self, run):
        recording, result = record(self, run)
        replay = recording.replay

        def replay_and_change():
            replay()
            # The copy of the logits.
            *_, (place,) = next(entry for entry in reversed(recording.kept) if "aten.copy_" in str(entry[0]))
            place.add_(1)

        recording.replay = replay_and_change
        return recording, result

    if RANK == 1:
        EmulatedRecorder.record = wrong
    try:
        words = refused(model)
    finally:
        EmulatedRecorder.record = record
    assert ("differed from the step itself" if RANK == 1 else "on another rank") in words, words


def all_ranks_stop_if_one_has_another_model(checkpoint):
    model = load(checkpoint, graphs=True)
    generate(model)
    if RANK == 1:
        norm = model.model.norm
        norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
    assert "in different states" in refused(model)
    state = known(model)
    before = state.replayed
    # Both ranks have started over, so their counts are equal again.
    generate(model)
    assert state.replayed > before


class Observer(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def all_ranks_run_uncaptured_if_one_is_observed(checkpoint):
    """By a hook on a module, a hook for all modules, or a mode."""
    model = load(checkpoint)
    expected = generate(model)
    replayed = known(model).replayed
    count = lambda *_: None  # noqa: E731
    observers = (
        lambda: removed(model.model.layers[0].mlp.register_forward_hook(count)),
        lambda: removed(register_module_forward_hook(count)),
        Observer,
    )
    for observer in observers:
        with observer() if RANK == 1 else nullcontext():
            assert generate(model) == expected
    state = known(model)
    assert state.replayed == replayed and state.disabled is None
    assert ("another rank runs this call uncaptured" in state.turned_away) is (RANK == 0), state.turned_away
    assert sum(state.turned_away.values()) == 3, state.turned_away
    assert generate(model) == expected and state.replayed > replayed


@contextmanager
def removed(handle):
    """Remove a hook at the end."""
    try:
        yield
    finally:
        handle.remove()


def destroying_another_group_keeps_the_recordings(checkpoint):
    # Release the caches of earlier checks.
    graph_teardown.release()
    before = teardown_functions()
    model = load(checkpoint)
    generate(model)
    assert all(current is not original for current, original in zip(teardown_functions(), before, strict=True))
    replayed = known(model).replayed
    group = dist.new_group([0])
    if RANK == 0:
        dist.destroy_process_group(group)
    generate(model)
    assert (known(model).recorded, known(model).replayed) == (1, replayed + 11)
    hf_rocm.restore(model)
    assert all(current is original for current, original in zip(teardown_functions(), before, strict=True))
    group = dist.new_group()
    # Under load, the other rank may still be connecting to this one.
    dist.barrier()
    # After this, only the initial group remains.
    dist.destroy_process_group(group)


def recordings_are_emptied_before_their_group_is_destroyed(checkpoint):
    """Recordings are emptied even if a traceback or another reference keeps them alive."""
    before = teardown_functions()
    model = load(checkpoint)
    generate(model)
    cache = known(model).pool._idle[0].cache
    kept = [recording for recording in cache.recordings.values() if isinstance(recording, RecordedStep)]
    assert kept and all(cache_recording._recording.kept for cache_recording in kept)
    destroy_process_group()
    assert not cache.recordings and not any(cache_recording._recording.kept for cache_recording in kept)
    assert not dist.is_initialized()
    assert all(current is original for current, original in zip(teardown_functions(), before, strict=True))


def teardown_functions():
    return [
        dist.destroy_process_group,
        dist.distributed_c10d.destroy_process_group,
        vars(dist.ProcessGroup)["shutdown"],
    ]


CHECKS = (
    tokens_equal_stock,
    enabled_unless_switched_off,
    refuses_a_backend_that_cannot_be_recorded,
    all_ranks_stop_if_one_cannot_record,
    all_ranks_stop_if_one_replays_something_else,
    all_ranks_stop_if_one_has_another_model,
    all_ranks_run_uncaptured_if_one_is_observed,
    destroying_another_group_keeps_the_recordings,
    recordings_are_emptied_before_their_group_is_destroyed,
)


def main(checkpoint: str) -> None:
    global RANK
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    RANK = dist.get_rank()
    recorder.factories["cpu"] = EmulatedRecorder
    recorder.collectives["cpu"] = frozenset(("gloo",))
    results = {}
    for check in CHECKS:
        try:
            check(checkpoint)
            results[check.__name__] = ""
        except Exception:  # noqa: BLE001
            # A failed check must not stop the others.
            results[check.__name__] = traceback.format_exc()
        if check is not CHECKS[-1]:
            dist.barrier()
    # Print without a barrier, because the last check destroyed the group.
    print(json.dumps(results), flush=True)
    # Under load, gloo's threads may abort the process while the interpreter exits.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
