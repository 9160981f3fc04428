"""rotary_angles in the Triton kernel: as accurate as PyTorch's cos and sin of the same fp32 angles."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops
from hf_rocm.errors import OptionError
from hf_rocm.ops.rotary_angles import LAYOUTS, one_kernel, stock
from hf_rocm.ops.specs.pointwise import RotaryAnglesSpec
from hf_rocm.ops.triton import rotary_angles as triton
from tests.amdgcn import suite
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import compiled_once, here, routed

SHORT = (0, 1, 2, 3, 5, 1000, 8191)
# cos and sin of angles above 105615 need a reduction with more than three parts of π / 2.
LONG = (32767, 105615, 105616, 131071, 131072, 1_000_003, 16_777_217, 2**31 - 1, 2**31 + 1000, -1, -131071)
# Every compiled variant has to run with small and with large angles, because their ranges are reduced differently. With
# a large position first, a call with one token and several frequencies has both.
MIXED = (1_000_003, 0, 1, 5, 131072, 1000, 8191)


def inv_freq(count, dtype=torch.float32, base=10000.0):
    return (base ** -(torch.arange(count, dtype=torch.float64) / count)).to(dtype)


def positions(*shape, among=(*MIXED, *SHORT, *LONG), dtype=torch.int64):
    count = torch.Size(shape).numel()
    return torch.tensor(among).repeat(-(-count // len(among)))[:count].view(shape).to(dtype)


def check(frequencies, position_ids, *, dtype=torch.float32, scaling=1.0, layout="halves"):
    outputs = routed("rotary_angles", frequencies, position_ids, dtype=dtype, scaling=scaling, layout=layout)
    eager = stock(frequencies, position_ids, scaling, layout, dtype)
    expected = stock(frequencies.double(), position_ids, scaling, layout, dtype)
    width = len(frequencies) * (1 if layout == "once" else 2)
    for output, reference, exact in zip(outputs, eager, expected, strict=True):
        assert output.shape == (*position_ids.shape, width) and output.is_contiguous() and exact.dtype == torch.float64
        assert_as_good_as_eager(output, reference, exact)
    return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 24, 64])
def test_rotary_angles(count, layout, dtype):
    for shape in ((1, 1), (2, 37)) if suite.gpu() is None else ((1, 1), (2, 9), (2, 37)):
        check(inv_freq(count), positions(*shape), dtype=dtype, scaling=1.3465, layout=layout)
    check(inv_freq(count), positions(1, 1, among=SHORT), dtype=dtype, scaling=1.3465, layout=layout)


@pytest.mark.parametrize("among", [SHORT, LONG], ids=["short", "long"])
def test_large_positions_are_as_accurate_as_pytorchs_functions(among):
    """A fast approximation, or an angle that is not rounded to fp32 before its range is reduced, would fail."""
    cos, sin = check(inv_freq(16, base=1.7), positions(1, len(among), among=among))
    reference = stock(inv_freq(16, base=1.7), positions(1, len(among), among=among), 1.0, "halves", torch.float32)
    for actual, expected in zip((cos, sin), reference, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=3e-7)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_positions_with_any_strides_are_supported(dtype):
    padded = torch.tensor([[1, 1, 1, 0, 1, 2, 1_000_003], [0, 1, 2, 3, 4, 5, 6]], dtype=dtype)
    whole = positions(3, 8, among=MIXED, dtype=dtype)
    # The last view is a single token at position 1_000_003.
    for position_ids in (padded, whole[:, ::2], whole.t(), whole[:1].expand(3, 8), whole[1:2, 6:7]):
        check(inv_freq(8), position_ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_frequencies_of_a_converted_model_are_read_in_their_dtype(dtype):
    check(inv_freq(12, dtype), positions(2, 5, among=MIXED), dtype=dtype)


def test_nothing_is_launched_without_tokens():
    assert [out.shape for out in check_empty()] == [(2, 0, 16)] * 2


def check_empty():
    return routed("rotary_angles", inv_freq(8), torch.zeros(2, 0, dtype=torch.int64), dtype=torch.float32)


def test_a_compiled_call_is_one_operator_in_the_graph():
    def cos_and_sin(frequencies, position_ids):
        return torch.cat(ops.rotary_angles(frequencies, position_ids, dtype=torch.float32))

    nodes = compiled_once(cos_and_sin, inv_freq(8), positions(2, 3, among=MIXED))
    assert sum("triton_rotary_angles" in node for node in nodes) == 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"grad": True}, "gradient"),
        ({"dtype": torch.float64}, "got an output of torch.float64"),
        ({"freq_dtype": torch.float64}, "frequencies of torch.float64"),
        ({"position_dtype": torch.float32}, "needs int64 or int32 positions, got torch.float32"),
        ({"frequencies": 513}, "513"),
        ({"frequencies": 0}, "got 0"),
    ],
    ids=str,
)
def test_refusals_have_a_reason(changed, reason):
    spec = RotaryAnglesSpec(torch.bfloat16, torch.float32, torch.int64, torch.device("cpu"), 64, "halves", False)
    assert triton.refuses(spec, here()) is None
    assert reason in triton.refuses(spec._replace(**changed), here())
    assert not one_kernel(inv_freq(4).double(), positions(1, 1), dtype=torch.float32, layout="halves")


def test_an_unknown_layout_is_an_error():
    with pytest.raises(OptionError, match="thirds"):
        ops.rotary_angles(inv_freq(4), positions(1, 1), dtype=torch.float32, layout="thirds")
