"""bench ops: every implementation is timed separately, wrong ones aren't timed, and refusals are reported."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_rocm.errors import OptionError
from hf_rocm.ops.registry import operations
from hf_rocm.tools.bench import ops_run, routing
from hf_rocm.tools.bench.known_shapes import SHAPES
from hf_rocm.tools.bench.ops import compare_all
from hf_rocm.tools.bench.ops_cases import OPERATIONS, Sizes, cases
from hf_rocm.tools.bench.run import Subject
from tests.tools.bench.conftest import CPU, RATES


def lines(*names):
    sizes = Sizes((2,), (1,), (24,), 9, CPU, torch.float32)
    return list(compare_all(list(cases(names, SHAPES["small"], sizes)), RATES, CPU, lambda text: None))


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_compared_across_all_its_implementations(name):
    result = lines(name)
    candidates = {
        f"{implementation.tier}: {implementation.name}" for implementation in operations()[name].implementations
    }
    assert candidates <= {entry.implementation for entry in result}
    timed = {entry.implementation.split(":")[0] for entry in result if entry.microseconds is not None}
    assert timed == {"torch", "eager"}
    for part in result:
        assert (part.microseconds is None) == (part.reason is not None) and part.floor > 0
    # The choices made for the comparison are dropped.
    assert not operations()[name].choices


def test_every_line_ran_its_own_implementation(monkeypatch):
    ran = []
    for implementation in operations()["rms_norm"].implementations:
        call = implementation.call
        monkeypatch.setitem(
            implementation.__dict__,
            "call",
            lambda *args, name=implementation.name, call=call: ran.append(name) or call(*args),
        )
    lines("rms_norm")
    assert {"F.rms_norm", "formula"} <= set(ran)
    monkeypatch.setitem(operations()["rms_norm"].implementations[-2].__dict__, "call", lambda x, *rest: x * 1.001)
    faulty = operations()["rms_norm"].implementations[-2].name
    (line,) = [entry for entry in lines("rms_norm") if entry.implementation.endswith(faulty)]
    assert line.microseconds is None and "its results are wrong" in line.reason


def test_pytorchs_attention_backends_are_compared_separately():
    result = {line.implementation: line for line in lines("attention")}
    assert result["torch: SDPA, math"].microseconds is not None
    assert result["torch: SDPA, cudnn_attention"].reason is not None


def test_the_floor_of_a_gemm_is_the_longer_of_memory_and_compute_time():
    (line, *_) = [outcome for outcome in lines("linear") if outcome.case.startswith("o,")]
    assert line.floor == pytest.approx(1e6 * max(4 * (256 * 256 + 2 * 512) / 1e10, 2 * 2 * 256 * 256 / 1e11))


def test_routing_overhead_is_measured_with_an_empty_implementation(monkeypatch):
    monkeypatch.setattr(routing, "CALLS", 50)
    monkeypatch.setattr(routing, "ROUNDS", 3)
    result = list(routing.routing())
    assert [outcome.case for outcome in result] == ["attention", "linear", "act_and_mul", "rms_norm"]
    assert all(0 < entry.microseconds < 1000 for entry in result)
    assert not any(operations()[outcome.case].choices for outcome in result)


def test_a_run_returns_a_segment_and_refuses_an_encoder():
    sizes = {"rows": (1,), "batches": (1,), "keys": (8,), "prompt": 8}
    done = ops_run.compare_ops(Subject(None, "small", CPU), ["rope"], **sizes, segment="x", progress=lambda text: None)
    assert done.kernels and not done.results and done.kernels[0]["operation"] == "rope"
    with pytest.raises(OptionError, match="bert-base is an encoder"):
        ops_run.compare_ops(Subject(None, "bert-base", CPU), [], **sizes, segment="x", progress=lambda text: None)


def test_a_case_whose_reference_does_not_fit_into_memory_is_not_timed(monkeypatch):
    def call(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise torch.OutOfMemoryError("out of memory")
        return F.rms_norm(x, x.shape[-1:])

    monkeypatch.setitem(operations()["rms_norm"].implementations[-1].__dict__, "call", call)
    result = lines("rms_norm")
    assert result and all(line.microseconds is None for line in result)
    assert any("needs more memory" in str(line.reason) for line in result)
