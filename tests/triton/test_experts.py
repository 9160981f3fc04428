"""Routed experts in the Triton kernels, compared with float64: variants, weight layouts, rounding, and routes."""

from __future__ import annotations

from math import gcd
from typing import Any

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.device import Device
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops import moe, moe_torch, probe
from hf_rocm.ops.specs.experts import ExpertsSpec
from hf_rocm.ops.triton import experts
from hf_rocm.ops.triton import launch as launching
from tests.amdgcn import suite
from tests.ops.test_moe import LAYOUTS, arguments_of, drawn, eager, reference
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import compiled_once, here, random, routed, shifted, with_gaps

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
CPU = Device("cpu", rocm=False)
BF16 = torch.bfloat16
ODD = (5, 7, 3, 20, 9)  # (T, E, k, H, I)
# added to the sizes; with machine code, larger sizes also run, which have several full blocks
LONGER = (0,) if suite.gpu() is None else (0, 160)
GATE_UP, DOWN = experts.gate_up_tile, experts.down_tile


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Use several small blocks along K, and wide ones along N, because every program is slow in the interpreter."""
    monkeypatch.setattr(experts, "gate_up_tile", lambda transposed: experts.ExpertsTile(8, 16, 64, 2))
    monkeypatch.setattr(
        experts, "down_tile", lambda tokens, top, transposed, rocm: experts.ExpertsTile(8, 8, 64, 2, gcd(top, 4))
    )


@every_dtype
@every_layout
def test_experts_are_as_accurate_as_the_eager_tier(layout, dtype):
    tokens, experts_, top, hidden, inner = ODD
    for extra in LONGER:
        sizes = (hidden + extra, inner + extra)
        check(*drawn((tokens if dtype == BF16 else 2, experts_, top, *sizes), dtype, layout))


@pytest.mark.parametrize("top", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("tokens", [1, 2])
def test_every_number_of_experts_is_supported(tokens, top):
    for layout in ("plain", "gpt_oss", "llama4"):
        for extra in LONGER:
            check(*drawn((tokens, 9, top, 24 + extra, 11 + extra), BF16, LAYOUTS[layout]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("sizes", [(32, 16), (33, 16), (32, 17), (1, 1)], ids=str)
def test_every_layout_of_the_weights_is_supported(sizes, biases, transposed, interleaved):
    """Some sizes are multiples of the block sizes, and some are not."""
    form = {"biases": biases, "transposed": transposed, "interleaved": interleaved}
    for extra in LONGER:
        check(*drawn((2, 4, 2, *(size + extra for size in sizes)), BF16, form))


@pytest.mark.parametrize("layout", ["plain", "gpt_oss", "llama4"])
@pytest.mark.parametrize(("tokens", "sizes"), [(1, (64, 256)), (1, (70, 5)), (5, (70, 5))], ids=str)
def test_the_tiles_of_a_gpu_have_the_same_results(tokens, sizes, layout, monkeypatch):
    monkeypatch.setattr(experts, "gate_up_tile", GATE_UP)
    monkeypatch.setattr(experts, "down_tile", DOWN)
    check(*drawn((tokens, 3, 2, *sizes[:: 1 if layout == "plain" else -1]), BF16, LAYOUTS[layout]))


def test_blocks_divide_the_sizes_of_the_compiled_builds():
    for tile, n, k in ((GATE_UP(False), 768, 2048), (DOWN(1, 8, False), 2048, 768)):
        assert experts._even(n, k, tile)
    for tile in (GATE_UP(True), DOWN(1, 4, True), DOWN(8, 4, True)):
        assert experts._even(2880, 2880, tile)


@pytest.mark.parametrize("weights_dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", ["plain", "llama4"])
def test_ids_and_weights_may_have_other_dtypes(layout, ids_dtype, weights_dtype):
    (*tensors, ids, weights), keywords = drawn(ODD, BF16, LAYOUTS[layout], weights_dtype)
    check((*tensors, ids.to(ids_dtype), weights), keywords)
    if suite.gpu() is not None:
        sizes = (5, 7, 3, 20 + LONGER[-1], 9 + LONGER[-1])
        (*tensors, ids, weights), keywords = drawn(sizes, BF16, LAYOUTS[layout], weights_dtype)
        check((*tensors, ids.to(ids_dtype), weights), keywords)


def test_views_are_read_with_their_strides():
    """Strided rows, an odd offset, and the first columns of wider routing tensors."""
    (x, gate_up, down, ids, weights), _ = drawn(ODD, BF16, {})
    check((x, gate_up, down, ids, weights), {})
    expected = routed("experts", x, gate_up, down, ids, weights)
    wide = random(5, 23, dtype=BF16)
    wide[:, 3:] = x
    routing = torch.cat((ids, ids), 1), torch.cat((weights, weights), 1)
    flat = random(1 + down.numel(), dtype=BF16)
    flat[1:] = down.flatten()
    shifted = flat[1:].view(down.shape)
    assert torch.equal(
        routed("experts", wide[:, 3:], gate_up, shifted, *(tensor[:, :3] for tensor in routing)), expected
    )


@every_layout
def test_biases_are_read_with_their_strides(layout):
    """Every other column of a wider bias, and one bias for all experts."""
    tensors, keywords = drawn(ODD, BF16, {**layout, "biases": True})
    strided, shared = dict(keywords), dict(keywords)
    for name in ("gate_up_bias", "down_bias"):
        strided[name] = torch.stack((keywords[name], random(*keywords[name].shape, dtype=BF16)), -1).flatten(1)[:, ::2]
        shared[name] = keywords[name][:1].expand_as(keywords[name])
    assert torch.equal(routed("experts", *tensors, **strided), routed("experts", *tensors, **keywords))
    check(tensors, shared)


def test_it_rounds_like_separate_layers():
    """Sums are exact in fp32, so results differ from a loop over experts only if the rounding points differ."""
    for layout in ("plain", "biases", "gpt_oss", "llama4"):
        (x, gate_up, down, ids, weights), keywords = drawn((4, 5, 1, 32, 16), BF16, LAYOUTS[layout])
        tensors = (x.round(), *((tensor * 16).round() / 16 for tensor in (gate_up, down)), ids, weights.bfloat16())
        expected = eager(tensors, keywords)
        differs = routed("experts", *tensors, **keywords) != expected
        # Exponentials may differ in the last bit.
        assert differs.float().mean() < 2e-2, layout


@every_dtype
@every_layout
def test_a_residual_is_added_after_the_result_is_rounded(layout, dtype):
    """The result is bitwise equal to a separate sum, also with residuals that have gaps between their rows."""
    for extra in LONGER:
        tensors, keywords = drawn((2, 7, 3, 20 + extra, 9 + extra), dtype, layout)
        residual = random(*tensors[0].shape, dtype=dtype, seed=1) * 30
        expected = residual + routed("experts", *tensors, **keywords)
        assert torch.equal(routed("experts_add", residual, *tensors, **keywords), expected)
        assert torch.equal(routed("experts_add", with_gaps(residual), *tensors, **keywords), expected)


@pytest.mark.parametrize("name", ["x", "gate_up", "down"])
def test_numbers_that_can_not_be_read_in_pairs_have_the_same_result(name, monkeypatch):
    """Tensors that begin between two words. The kernels read the rows of x and their own result, too, in words."""
    tensors, _ = drawn((2, 7, 3, 20, 10), BF16, {})
    used = []
    monkeypatch.setattr(experts, "in_pairs", lambda *sizes: used.append(launching.in_pairs(*sizes)) or used[-1])
    expected = routed("experts", *tensors)
    index = ["x", "gate_up", "down"].index(name)
    output = routed("experts", *(shifted(part) if place == index else part for place, part in enumerate(tensors)))
    assert used == [True, True, index == 2, index < 2]
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)


def test_without_tokens_or_pairs_the_residual_remains():
    tensors, _ = drawn((0, 4, 2, 16, 16), BF16, {})
    assert routed("experts_add", random(0, 16, dtype=BF16), *tensors).shape == (0, 16)
    (x, gate_up, down, ids, weights), _ = drawn((2, 4, 2, 16, 16), BF16, {})
    residual = random(2, 16, dtype=BF16)
    output = routed("experts_add", residual, x, gate_up, down, ids[:, :0], weights[:, :0])
    assert torch.equal(output, residual) and output.data_ptr() != residual.data_ptr()


def test_unselected_experts_are_not_read():
    (x, gate_up, down, _, weights), _ = drawn((2, 6, 2, 16, 24), BF16, {})
    ids = torch.tensor([[1, 3], [3, 1]])
    check((x, gate_up, down, ids, weights), {})
    expected = routed("experts", x, gate_up, down, ids, weights)
    gate_up[[0, 2, 4, 5]] = torch.nan
    down[[0, 2, 4, 5]] = torch.nan
    assert torch.equal(routed("experts", x, gate_up, down, ids, weights), expected)


def test_a_single_token_equals_its_result_in_a_batch():
    (x, gate_up, down, ids, weights), keywords = drawn((5, 8, 4, 40, 24), BF16, LAYOUTS["gpt_oss"])
    check((x, gate_up, down, ids, weights), keywords)
    batched = routed("experts", x, gate_up, down, ids, weights, **keywords)
    for row in range(5):
        part = slice(row, row + 1)
        single = routed("experts", x[part], gate_up, down, ids[part], weights[part], **keywords)
        assert torch.equal(single, batched[part])


def test_zero_tokens_give_an_empty_output():
    tensors, _ = drawn((0, 4, 2, 16, 16), BF16, {})
    assert routed("experts", *tensors).shape == (0, 16)


@pytest.mark.parametrize("layout", [LAYOUTS["plain"], LAYOUTS["gpt_oss"]], ids=["plain", "gpt_oss"])
def test_it_is_one_op_of_a_compiled_graph(layout):
    tensors, keywords = drawn((2, 4, 2, 16, 8), BF16, layout)
    nodes = compiled_once(lambda *value: ops.experts(*value, **keywords) * 2, *tensors)
    assert "hf_rocm.triton_experts.default" in nodes


def test_the_custom_op_passes_opcheck():
    tensors, keywords = drawn((2, 4, 2, 16, 8), torch.float32, LAYOUTS["gpt_oss"])
    *arguments, form = arguments_of(tensors, keywords)
    checks = ("test_schema", "test_faketensor")
    for residual in (None, torch.ones_like(tensors[0])):
        terms = (*arguments, residual, *form)
        torch.library.opcheck(torch.ops.hf_rocm.triton_experts.default, terms, test_utils=checks)


def test_only_a_few_pairs_are_served():
    tiers = []
    for tokens in (experts.PAIRS // 2, experts.PAIRS // 2 + 1):
        tensors, _ = drawn((tokens, 3, 2, 16, 8), BF16, {})
        with ops.recording() as routes:
            ops.experts(*tensors)
        tiers += [route.tier for route in routes if route.operation == "experts"]
    assert tiers == ["triton", "torch"]
    assert "more than 64 token-expert pairs" in str(experts.refuses(spec(pairs=moe.MANY), here()))


def test_many_pairs_are_served_if_the_tier_is_named():
    check(*drawn((experts.PAIRS // 2 + 1, 3, 2, 16, 8), BF16, {}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"grad": True}, "no gradient"),
        ({"dtype": torch.float64, "weight_dtype": torch.float64}, "not torch.float64"),
        ({"weight_dtype": torch.float16}, "one dtype"),
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
    assert "need a GPU" in str(experts.refuses(spec(), CPU))


def test_gradients_are_refused_when_the_tier_is_named():
    (x, *rest), _ = drawn(ODD, BF16, {})
    with options.override(tier="experts=triton"), pytest.raises(TierUnavailable, match="gradient"):
        ops.experts(x.requires_grad_(), *rest)


@pytest.mark.parametrize(("tiers", "most"), [({}, experts.PAIRS), ({"experts": "torch"}, moe_torch.FEW)], ids=str)
def test_the_limit_of_pairs_depends_on_the_tier(tiers, most, monkeypatch):
    x = torch.empty(0, dtype=BF16)
    # Gradients are enabled, so no Triton kernel is used.
    assert moe.max_pairs(x) == moe_torch.FEW
    with torch.no_grad():
        with options.override(tiers=tiers):
            assert moe.max_pairs(x) == most
        # No Triton kernel serves float64 or the meta device.
        assert moe.max_pairs(x.double()) == moe.max_pairs(x.to("meta")) == moe_torch.FEW
        monkeypatch.setattr(probe, "_off", {("experts", "triton", experts.NAME, "bfloat16"): "its check failed"})
        assert moe.max_pairs(x) == moe_torch.FEW


def check(tensors: tuple[torch.Tensor, ...], keywords: dict[str, Any]) -> None:
    """Compare with float64. In machine code, also check large gates, and NaN in skipped experts and some tokens."""
    for scale in (1, 30) if suite.gpu() is not None else (1,):
        call = (tensors[0] * scale, *tensors[1:])
        call, read = (call, call) if scale == 1 else with_skipped_experts(*call)
        output = routed("experts", *read, **keywords)
        assert_as_good_as_eager(output, eager(call, keywords), reference(call, keywords))
    if suite.gpu() is None or len(tensors[0]) < 2:
        return
    # NaN in some tokens affects only the outputs of these tokens.
    for first in (0, 1):
        rows = torch.arange(len(tensors[0])) % 2 == first
        masked = routed("experts", call[0].masked_fill(rows[:, None], torch.nan), *call[1:], **keywords)
        assert masked[rows].isnan().all() and torch.equal(masked[~rows], output[~rows])


def with_skipped_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, *rest: Any
) -> Any:
    """Returns a call that skips experts between the selected ones, and the same call with NaN in skipped experts."""
    ids = (ids.argsort(-1) * max(1, (len(down) - 1) // ids.shape[1])).to(ids.dtype)
    others = torch.ones(len(down), 1, 1, dtype=torch.bool)
    others[ids] = False
    masked = (weight.masked_fill(others, torch.nan) for weight in (gate_up, down))
    return (x, gate_up, down, ids, *rest), (x, *masked, ids, *rest)


def spec(**change: Any) -> ExpertsSpec:
    tensors, _ = drawn((1, 8, 2, 32, 16), BF16, {})
    return ExpertsSpec(*moe.specification(arguments_of(tensors, {})))._replace(**change)
