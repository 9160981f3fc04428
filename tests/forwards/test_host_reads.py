"""Observing a forward: the values that the host reads, the programs that compute them, and what can't be recorded."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

from hf_rocm.forwards.host_reads import Reads, StoredValues
from hf_rocm.generation.step import Unrecordable

META = torch.ones(3, device="meta")


@pytest.fixture(params=["no_grad", "inference_mode"])
def observed(request):
    """Returns a function that observes a call in this mode. Inference mode also dispatches composite operators."""
    return partial(_observed, getattr(torch, request.param))


def _observed(mode, run, *inputs, weights=()):
    with mode(), Reads(inputs, weights) as reads:
        run(*inputs)
    reads.finish()
    return reads


def test_a_program_computes_the_value_for_other_inputs(observed):
    def run(ids, mask):
        valid = mask.to(torch.bool)[:, 1:] & (ids[:, 1:] != 3)
        return int(valid.sum()) if bool(valid.all()) else None

    ids, mask = torch.arange(4, 10).view(2, 3), torch.ones(2, 3, dtype=torch.long)
    reads = observed(run, ids, mask)
    assert reads.reason is None and [read.value for read in reads.reads] == [(bool, True), (int, 4)]
    masked = mask.clone()
    masked[0, 2] = 0
    first, second = (read.program for read in reads.reads)
    assert first((ids, masked)) == (bool, False) and second((ids, masked)) == (int, 3)
    assert first((ids, mask)) == (bool, True) and first((torch.full_like(ids, 3), mask)) == (bool, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8, torch.int32], ids=str)
def test_large_activations_are_freed_during_the_forward(dtype, observed):
    """Activations that were rounded to 8 bits, and their products, are integers."""
    alive = []

    def run(x):
        large = torch.full((2**21,), 3, dtype=dtype)
        references = [weakref.ref(large), weakref.ref(large * 2)]
        del large
        alive.append([reference() is not None for reference in references])

    observed(run, torch.ones(3))
    assert alive == [[False, False]]


def test_weights_are_read_in_place(observed):
    weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    reads = observed(lambda x: bool((x * weight).sum() > 2), torch.ones(3), weights=[weight])
    (read,) = reads.reads
    weight.mul_(0.1)
    assert read.value == (bool, True) and read.program((torch.ones(3),)) == (bool, False)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_values_are_returned_in_order(mode):
    x = torch.ones(3)
    with mode(), StoredValues([(bool, False), (int, 7)]) as answers:
        assert not bool(x.all()) and int(x.sum()) == 7
        answers.finish()
        with pytest.raises(Unrecordable, match="more values"):
            bool(x.any())
    with mode(), StoredValues([(bool, True)]) as answers, pytest.raises(Unrecordable, match="fewer values"):
        answers.finish()


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda x: x.nonzero(), "its shapes depend on values"),
        (lambda x: x[x > 0], "its shapes depend on values"),
        (lambda x: x.mul_(2), "writes in place to a tensor that it did not create"),
        (lambda x: x[1:].zero_(), "writes in place to a tensor that it did not create"),
        (lambda x: bool((x + 1).mul_(2).sum() > 3), "that it has written in place"),
        (lambda x: x.to("meta"), "copies between devices"),
        (lambda x: torch.tensor(0.0, device="meta") + 1, "from values on the host"),
    ],
)
def test_unsupported_operations_are_refused_with_a_reason(run, reason, observed):
    assert reason in observed(run, torch.ones(3)).reason


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x[torch.tensor([2, 0])],
        lambda x: (x + 1).mul_(2),
        lambda x: torch.zeros(3, device="meta") + torch.tensor(2.0),
        lambda x: META + 1,
    ],
)
def test_supported_operations_can_be_recorded(run, observed):
    assert observed(run, torch.ones(3)).reason is None


def test_returning_a_random_state_on_the_host_is_not_a_copy(observed):
    """PyTorch's memory-efficient attention returns a random state on the host."""

    @torch.library.custom_op("hf_rocm_tests::with_state", mutates_args=())
    def with_state(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, torch.ones((), dtype=torch.long, device="meta")

    assert observed(lambda x: with_state(x)[0] + 1, torch.ones(3)).reason is None
    assert "copies between devices" in observed(lambda x: x.to("meta"), torch.ones(3)).reason
