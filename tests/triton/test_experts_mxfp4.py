"""Routed experts in MXFP4 in the Triton kernels, compared with float64: sizes, all FP4 values, and special scales."""

from __future__ import annotations

from math import gcd
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm import ops, options
from hf_rocm.device import Device
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops import moe, moe_mxfp4, moe_torch
from hf_rocm.ops.mxfp4 import dequantize
from hf_rocm.ops.specs.experts import ExpertsSpec, Mxfp4Call
from hf_rocm.ops.triton import experts_mxfp4 as experts
from hf_rocm.ops.triton.tiles import Mxfp4Tile, mxfp4_down_tile, mxfp4_gate_up_tile
from tests.amdgcn import suite
from tests.ops.test_moe_mxfp4 import drawn, eager, reference, unbiased
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import compiled_once, here, routed

BF16 = torch.bfloat16
DTYPES = [torch.float32, BF16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# added to the sizes; in machine code, an additional size takes several iterations of the loop
LONGER = (0,) if suite.gpu() is None else (0, 2080)


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """Use small blocks along K, for several iterations, and wide ones along N, because the interpreter is slow."""
    monkeypatch.setattr(experts, "mxfp4_gate_up_tile", lambda *_, **__: Mxfp4Tile(32, 2, 64, 2))
    monkeypatch.setattr(experts, "mxfp4_down_tile", lambda _, top, **__: Mxfp4Tile(32, 2, 64, 2, gcd(top, 4)))


@every_dtype
@pytest.mark.parametrize("tokens", [1, 3])
def test_experts_are_as_accurate_as_the_eager_tier(tokens, dtype):
    for extra in LONGER:
        check(*drawn((tokens, 5, 2, 96 + extra, 64), dtype))
        check(*drawn((tokens, 5, 2, 64, 96 + extra), dtype))


@pytest.mark.parametrize("top", [1, 2, 3, 4, 6, 8])
def test_every_number_of_experts_is_supported(top):
    check(*drawn((2, 8, top, 32, 64), BF16))


@every_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_other_gates_without_biases_are_supported(activation, dtype):
    for extra in LONGER:
        check(*unbiased(drawn((3, 5, 2, 96 + extra, 64), dtype)[0], activation))
        check(*unbiased(drawn((1, 5, 3, 64, 96 + extra), dtype)[0], activation))


@pytest.mark.parametrize("sizes", [(32, 32), (160, 96), (64, 224)], ids=str)
@pytest.mark.parametrize("blocks", [1, 4])
def test_whole_and_partial_tiles_have_the_same_results(sizes, blocks, monkeypatch):
    monkeypatch.setattr(experts, "mxfp4_gate_up_tile", lambda *_, **__: Mxfp4Tile(64, blocks, 64, 2))
    monkeypatch.setattr(experts, "mxfp4_down_tile", lambda *_, **__: Mxfp4Tile(64, blocks, 64, 2, 2))
    check(*drawn((1, 4, 2, *sizes), BF16))


def test_the_tiles_of_a_gpu_have_the_same_results(monkeypatch):
    monkeypatch.setattr(experts, "mxfp4_gate_up_tile", mxfp4_gate_up_tile)
    monkeypatch.setattr(experts, "mxfp4_down_tile", mxfp4_down_tile)
    check(*drawn((1, 3, 2, 64, 32), BF16))


def check(tensors: tuple[Tensor, ...], keywords: dict[str, Any]) -> None:
    with torch.no_grad():
        output = routed("mxfp4_experts", *tensors, **keywords)
    assert_as_good_as_eager(output, eager(tensors, keywords), reference(tensors, keywords))


@every_dtype
def test_every_value_is_decoded_at_every_position(dtype):
    """The input of the second GEMM has one nonzero number, so the output is exactly twice one column of the weight."""
    codes = torch.stack([torch.arange(32).roll(step) % 16 for step in range(32)])  # [H, I]
    down = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(1, 32, 1, 16)
    weight = dequantize(down, torch.full((1, 32, 1), 127).to(torch.uint8), dtype)[0]
    assert set(weight.flatten().tolist()) == {
        sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    }
    gate_up = torch.zeros(1, 64, 1, 16, dtype=torch.uint8)
    scales = {n: torch.full((1, n, 1), 127, dtype=torch.uint8) for n in (32, 64)}
    zeros, ids, one = torch.zeros(1, 32, dtype=dtype), torch.zeros(1, 1).long(), torch.ones(1, 1, dtype=dtype)
    for column in range(0, 32, 1 if suite.gpu() is not None else 5):
        bias = torch.zeros(1, 64, dtype=dtype)
        # `up + 1` is zero in all columns but one.
        bias[0, 1::2] = -1
        bias[0, 2 * column], bias[0, 2 * column + 1] = 64, 1 / 32 - 1
        # The sigmoid of 64 is 1.
        inner = 64 / 32
        first = gate_up, scales[64], bias
        output = routed("mxfp4_experts", zeros, *first, down, scales[32], zeros, ids, one, limit=64.0, alpha=1.0)
        assert torch.equal(output[0], inner * weight[:, column])


@every_dtype
def test_one_pass_dequantises_as_the_reference_does(dtype):
    blocks = torch.arange(256).to(torch.uint8).view(1, 1, 16, 16).expand(1, 16, 16, 16).contiguous()
    scales = torch.arange(256).to(torch.uint8).view(1, 16, 16)
    actual = experts.dequantized(blocks[0], scales[0], dtype)
    assert torch.equal(bits(actual), bits(dequantize(blocks, scales, dtype)[0]))


def bits(tensor: Tensor) -> Tensor:
    """Convert to float64 and replace NaN with a number, so that tensors can be compared."""
    return torch.where(tensor.isnan(), 12345.0, tensor.double())


def test_zeros_extremes_and_nan_affect_only_their_row():
    """A block with the scale 255 makes its row NaN. Other rows do not change."""
    (x, *first, down, scales, bias, ids, weights), keywords = drawn((2, 3, 2, 64, 64), BF16)
    scales[:, 3] = 0
    scales[:, 4] = 254 - 40
    down[:, 5] = 0
    # 0x88 contains two negative zeros.
    down[:, 6] = 0x88
    bias[:, 3:7] = 0
    tensors = (x, *first, down, scales, bias, ids, weights)
    output = routed("mxfp4_experts", *tensors, **keywords)
    expected = reference(tensors, keywords)
    assert (output[:, 5:7] == 0).all() and (output[:, 3].double().abs() > 0).all()
    for row in (3, 4):
        assert_as_good_as_eager(output[:, row], eager(tensors, keywords)[:, row], expected[:, row])
    broken = scales.clone()
    broken[:, 7, 1] = 255
    again = routed("mxfp4_experts", x, *first, down, broken, bias, ids, weights, **keywords)
    others = [column for column in range(64) if column != 7]
    assert again[:, 7].isnan().all() and torch.equal(again[:, others], output[:, others])
    broken[:, 7, 1], down[:, 7] = 254, 0x77
    assert not torch.isfinite(routed("mxfp4_experts", x, *first, down, broken, bias, ids, weights)[:, 7]).any()


@pytest.mark.parametrize("magnitude", [2.0**-30, 2.0**30])
def test_small_and_large_inputs_lose_no_precision(magnitude):
    """The scales of the first GEMM cancel the magnitude of x."""
    (x, gate_up, scales, *rest), keywords = drawn((2, 3, 2, 64, 32), BF16)
    exponent = int(torch.tensor(magnitude).log2())
    scaled = x * magnitude, gate_up, (scales.int() - exponent).to(torch.uint8), *rest
    expected = routed("mxfp4_experts", x, gate_up, scales, *rest, **keywords)
    assert torch.equal(routed("mxfp4_experts", *scaled, **keywords), expected)


def test_unselected_experts_are_not_read():
    (x, *first, down, scales, bias, _, weights), keywords = drawn((2, 6, 2, 32, 32), BF16)
    ids = torch.tensor([[1, 3], [3, 1]])
    expected = routed("mxfp4_experts", x, *first, down, scales, bias, ids, weights, **keywords)
    for tensor in (first[1], scales):
        tensor[[0, 2, 4, 5]] = 255
    assert torch.equal(routed("mxfp4_experts", x, *first, down, scales, bias, ids, weights, **keywords), expected)
    assert torch.isfinite(expected).all()


def test_a_single_token_equals_its_result_in_a_batch():
    (x, *stored, ids, weights), keywords = drawn((5, 8, 4, 64, 32), BF16)
    batched = routed("mxfp4_experts", x, *stored, ids, weights, **keywords)
    for row in range(5):
        part = slice(row, row + 1)
        single = routed("mxfp4_experts", x[part], *stored, ids[part], weights[part], **keywords)
        assert torch.equal(single, batched[part])


def test_rows_may_be_strided_and_blocks_unaligned():
    """Rows are strided, and blocks begin at any address, as in a mapped file."""
    (x, gate_up, *rest), keywords = drawn((5, 3, 2, 64, 32), BF16)
    expected = routed("mxfp4_experts", x, gate_up, *rest, **keywords)
    wide = torch.cat((x, x), 1)[:, :64]
    flat = torch.zeros(1 + gate_up.numel(), dtype=torch.uint8)
    flat[1:] = gate_up.flatten()
    assert torch.equal(routed("mxfp4_experts", wide, flat[1:].view(gate_up.shape), *rest, **keywords), expected)


def test_zero_tokens_give_an_empty_output():
    tensors, _ = drawn((0, 4, 2, 32, 32), BF16)
    assert routed("mxfp4_experts", *tensors).shape == (0, 32)


def test_it_is_one_op_of_a_compiled_graph():
    tensors, keywords = drawn((2, 4, 2, 32, 32), BF16)
    nodes = compiled_once(lambda *value: ops.mxfp4_experts(*value, **keywords) * 2, *tensors)
    assert "hf_rocm.triton_mxfp4_experts.default" in nodes


def test_the_custom_op_passes_opcheck():
    tensors, _ = drawn((2, 4, 2, 32, 32), torch.float32)
    checks = ("test_schema", "test_faketensor")
    for arguments in (tensors, "clamped_swiglu", 7.0, 1.0), (unbiased(tensors)[0], "silu", 0.0, 0.0):
        flat = (*arguments[0], *arguments[1:])
        torch.library.opcheck(torch.ops.hf_rocm.triton_mxfp4_experts.default, flat, test_utils=checks)


@pytest.mark.parametrize("at_once", [2, 7])
@every_dtype
def test_with_more_than_256_pairs_the_experts_are_dequantised(at_once, dtype, monkeypatch):
    """All experts are dequantised together, or as many as fit into temporary memory. The last expert has no tokens."""
    assert "more than 256 token-expert pairs" in str(experts.refuses(spec(pairs=moe.MANY), here()))
    monkeypatch.setattr(experts, "PAIRS", 6)
    monkeypatch.setattr(moe_mxfp4, "_TEMPORARY", at_once * 2 * 64 * 32 * dtype.itemsize)
    names = []
    for tokens in (experts.PAIRS // 2, experts.PAIRS // 2 + 1, 31):
        tensors, keywords = drawn((tokens, 7, 2, 32, 64), dtype)
        tensors[-2].copy_(torch.rand(tokens, 6, generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :2])
        with ops.recording() as routes:
            output = ops.mxfp4_experts(*tensors, **keywords)
        names += [(route.tier, route.name) for route in routes if route.operation == "mxfp4_experts"]
        assert_as_good_as_eager(output, eager(tensors, keywords), reference(tensors, keywords))
    assert names == [("triton", experts.NAME), *[("triton", "dequantize, grouped_mm")] * 2]


def test_without_a_grouped_gemm_experts_run_one_by_one(monkeypatch):
    """Experts run one by one if PyTorch has no grouped GEMM, or if gradients are enabled."""
    tensors, keywords = drawn((experts.PAIRS, 3, 2, 32, 32), BF16)
    with options.override(tiers={"experts": "triton"}):
        monkeypatch.setattr(moe_torch, "_grouped_mm", None)
        with ops.recording() as routes, torch.no_grad():
            output = ops.mxfp4_experts(*tensors, **keywords)
        assert_as_good_as_eager(output, eager(tensors, keywords), reference(tensors, keywords))
        monkeypatch.undo()
        tensors[0].requires_grad_()
        with ops.recording() as more:
            ops.mxfp4_experts(*tensors, **keywords).sum().backward()
    names = [route.name for route in (*routes, *more) if route.operation == "mxfp4_experts"]
    assert names == ["dequantize, sorted tokens, loop"] * 2
    assert torch.isfinite(tensors[0].grad).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"grad": True}, "no gradient"),
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"contiguous": False}, "aren't contiguous"),
        ({"hidden": 2**16, "intermediate": 2**14}, "2³¹ weights or more"),
        ({"hidden": 2**17}, "at most 65536 columns"),
    ],
    ids=str,
)
def test_unsupported_calls_are_refused(change, reason):
    assert reason in str(experts.refuses(spec(**change), here()))
    assert experts.refuses(spec(), here()) is None


def test_a_gpu_or_the_interpreter_is_needed(monkeypatch):
    monkeypatch.setattr(options, "triton_interprets", lambda: False)
    assert "need a GPU" in str(experts.refuses(spec(), Device("cpu", rocm=False)))


def test_an_unsupported_dtype_raises_if_the_tier_was_named():
    (x, *rest), _ = drawn((2, 4, 2, 32, 32), torch.float64)
    with options.override(tier="experts=triton"), pytest.raises(TierUnavailable, match="float64"):
        ops.mxfp4_experts(x, *rest)


def spec(**change: Any) -> ExpertsSpec:
    tensors, _ = drawn((1, 8, 2, 32, 32), BF16)
    call = Mxfp4Call(*tensors, "clamped_swiglu", 7.0, 1.0)  # type: ignore[arg-type]
    return ExpertsSpec(*moe_mxfp4.specification(call))._replace(**change)  # type: ignore[arg-type]
