"""Another thread's call changes the model's experts implementation between and within recorded steps."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import pytest
import torch
from packaging.version import Version

from hf_rocm.generation import comparison, runner
from hf_rocm.generation.decode_experts import implementation
from hf_rocm.generation.recorded_step import RecordedStep
from hf_rocm.generation.state import known
from tests.generation.conftest import Streamer, counted, generate, prompt
from tests.releases import RELEASE, in_the_newest

pytestmark = pytest.mark.skipif(Version("5.0") > RELEASE, reason="not run: the implementation can't be selected")


@contextmanager
def call_of_another_thread(model):
    """Change the implementation as `generate` does on a GPU while it decodes."""
    before = implementation(model)
    other = "batched_mm" if before == "grouped_mm" else "grouped_mm"
    with model._optimize_model_for_decode():
        model.set_experts_implementation(other)
        yield
        model.set_experts_implementation(before)


def test_a_comparison_with_another_implementation_is_repeated(pair, monkeypatch):
    prepared, stock = pair("mixtral")
    run, compared = comparison._run, []

    def uncaptured(model, *rest):
        compared.append(model)
        # The runs of three comparisons, except the second run of the third one.
        if 5 < len(compared) < 11:
            with call_of_another_thread(model):
                return run(model, *rest)
        return run(model, *rest)

    monkeypatch.setattr(comparison, "_run", uncaptured)
    assert torch.equal(generate(prepared, new=30), generate(stock, new=30))
    assert len(compared) > 10 and counted(prepared)[0] == 1 and known(prepared).disabled is None


def test_a_recording_with_several_implementations_is_dropped(pair, monkeypatch):
    prepared, stock = pair("mixtral")
    steps = []

    class Step(RecordedStep):
        def __init__(self, recorder, inputs, run, *rest, **options):
            def switched(buffers):
                with call_of_another_thread(prepared):
                    return run(buffers)

            steps.append(self)
            super().__init__(recorder, inputs, run if len(steps) > 1 else switched, *rest, **options)

    monkeypatch.setattr(runner, "RecordedStep", Step)
    assert torch.equal(generate(prepared, new=20), generate(stock, new=20))
    assert len(steps) == 2 and counted(prepared)[0] == 1 and known(prepared).disabled is None


def test_a_model_without_experts_keeps_recordings_made_during_calls_of_other_threads(pair, monkeypatch):
    """`generate` enters the same context for every model. In transformers 5.0, it enters the context once per step."""
    prepared, stock = pair()
    steps = []

    class Step(RecordedStep):
        def __init__(self, *arguments, **options):
            with prepared._optimize_model_for_decode():
                steps.append(self)
                super().__init__(*arguments, **options)

    monkeypatch.setattr(runner, "RecordedStep", Step)
    assert torch.equal(generate(prepared), generate(stock))
    assert len(steps) == 1 and counted(prepared)[0] == 1 and known(prepared).switches == 0


# In transformers 5.0, `generate` sets the implementation before every step.
@in_the_newest
def test_every_implementation_has_its_own_recording(pair):
    prepared, stock = pair("mixtral")

    other = ExitStack()
    switching = {8: lambda _: other.enter_context(call_of_another_thread(prepared)), 20: lambda _: other.close()}
    inputs = prompt(rows=1, length=5)
    tokens = generate(prepared, inputs, new=30, streamer=Streamer(switching))
    assert torch.equal(tokens, generate(stock, inputs, new=30))
    assert counted(prepared)[0] == 2 and known(prepared).disabled is None
