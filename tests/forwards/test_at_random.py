"""Random calls of all families with varying shapes, lengths, masks, dtypes, flags, threads, adapters and weights."""

from __future__ import annotations

import pytest

from hf_rocm import options
from hf_rocm.forwards.host_reads import Program
from hf_rocm.forwards.recorded import RecordedForward
from hf_rocm.forwards.snapshot import Snapshot
from hf_rocm.forwards.state import known
from hf_rocm.generation import recorder
from tests.forwards.conftest import counted, reasons, recorder_with
from tests.forwards.families import FAMILIES, padded_families
from tests.forwards.soak import CALLS, close, differing, exactly
from tests.generation import faults

pytestmark = [pytest.mark.usefixtures("recorded_on_cpu"), pytest.mark.filterwarnings("ignore::UserWarning:peft")]


@pytest.mark.parametrize("name", FAMILIES)
def test_random_calls_equal_stock(name):
    with options.override(pad_tokens=0):
        models, differences = differing(name, same=exactly, calls=CALLS)
    assert differences == []
    assert_replayed(models.prepared)


@pytest.mark.parametrize("name", padded_families())
def test_random_lengths_equal_stock(name):
    models, differences = differing(name, same=close, lengths=range(4, 62), calls=CALLS // 2)
    assert differences == []
    assert_replayed(models.prepared, calls=CALLS // 2)
    assert set(known(models.prepared).padded) == {32, 64} and known(models.prepared).unpadded is None


def assert_replayed(prepared, calls=CALLS):
    recorded, replayed = counted(prepared)
    assert recorded > 4 and replayed > calls // 5, (recorded, replayed, reasons(prepared))
    assert known(prepared).disabled is None and not reasons(prepared)


def never_copied(patch):
    patch.setattr(RecordedForward, "copies", lambda self, inputs, _=None: self.replay(inputs) or list(self.tensors))


def stale_inputs(patch):
    replay = RecordedForward.replay

    def of_every_third(self, inputs):
        self.number = getattr(self, "number", 0) + 1
        replay(self, self._inputs if self.number % 3 == 0 else inputs)

    patch.setattr(RecordedForward, "replay", of_every_third)


def one_path(patch):
    evaluate = Program.__call__
    first = {}
    patch.setattr(Program, "__call__", lambda self, inputs: first.setdefault(id(self), evaluate(self, inputs)))


def one_state(patch):
    patch.setattr(Snapshot, "unchanged", lambda self, model: True)


def wrong_replays(patch):
    patch.setitem(recorder.factories, "cpu", recorder_with(faults.garbage, first=6))


@pytest.mark.parametrize("fault", [never_copied, stale_inputs, one_path, one_state, wrong_replays])
def test_faults_are_detected(fault, monkeypatch):
    with options.override(pad_tokens=0):
        fault(monkeypatch)
        models, differences = differing("bert", same=exactly)
    assert differences or known(models.prepared).disabled
