"""4-bit weights with a code in Triton kernels: GEMMs compared with float64, dequantised weights with the torch tier."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from hf_rocm import ops
from hf_rocm.ops import four_bit, probe_cases
from hf_rocm.ops import quantized as operation
from hf_rocm.ops.four_bit import CODES, Nested, dequantize_groups
from hf_rocm.ops.triton import quantized
from hf_rocm.ops.triton.tiles import four_bit_tile
from tests.amdgcn import suite
from tests.triton.routed import compiled_once, here, random, routed
from tests.triton.test_dequantize import assert_same
from tests.triton.test_quantized import BF16, FORMS, FP16, SPEC, check

every_code = pytest.mark.parametrize("code", CODES)
every_scale = pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
INT4 = SPEC._replace(format=four_bit.INT4)


def drawn(n: int, k: int, group: int, *, double: bool = False, seed: int = 0) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns random words and the other arguments of the operation. Adjacent factors of double quantisation differ."""
    generator = torch.Generator().manual_seed(n + k + seed)
    words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator).int()
    shape = n, k // group
    if not double:
        return words, {"scale": torch.rand(shape, generator=generator) + 0.1}
    count = -(-shape[0] * shape[1] // four_bit.PER_FACTOR)
    factors = torch.rand(count, 2, generator=generator) * torch.tensor([0.5, 0.1]) + torch.tensor([0.1, 0.7])
    levels = torch.randint(256, shape, generator=generator).to(torch.uint8)
    return words, {"scale": levels, "nested": Nested(torch.linspace(-1, 1, 256), factors)}


def check_gemm(x: torch.Tensor, n: int, k: int, group: int, code: str, *, double: bool = False, **kwargs: Any) -> None:
    words, rest = drawn(n, k, group, double=double)
    check(x, words, rest["scale"], kwargs.pop("bias", None), code=code, nested=rest.get("nested"), **kwargs)


@every_code
@every_scale
@pytest.mark.parametrize("m", [1, 2, 16, 17, 64])
def test_every_class_of_rows(m, double, code):
    # With K = 2560, the loop takes several iterations.
    for k in (512,) if suite.gpu() is None else (512, 2560):
        check_gemm(random(m, k, dtype=BF16), 67, k, 64, code, double=double)


@every_scale
@pytest.mark.parametrize("pieces", [1, 2, 4])
# Runs of 16, 32 and 64.
@pytest.mark.parametrize(("k", "group"), [(640, 64), (1280, 64), (1536, 256)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_run_is_processed_in_pieces(monkeypatch, activation, k, group, pieces, double):
    tile = quantized.four_bit_tile
    monkeypatch.setattr(quantized, "four_bit_tile", lambda *args, **terms: tile(*args, **terms)._replace(pieces=pieces))
    check_gemm(random(1, k, dtype=BF16), 22, k, group, "nf4", double=double, activation=activation)


def test_runs_whose_scales_take_long_to_decode_are_processed_in_pieces():
    for nested, gated, pieces in ((True, False, 2), (True, True, 4), (False, False, 2), (False, True, 4)):
        terms: dict[str, Any] = {"table": True, "nested": nested}
        assert four_bit_tile(1, 4096, gated, 32, scale_bytes=1, **terms).pieces == pieces
        assert four_bit_tile(1, 4096, gated, 32, scale_bytes=1, rocm=True, **terms).pieces == 1
    assert four_bit_tile(1, 4096, False, 32, table=True, scale_bytes=4).pieces == 1


# The sizes result in runs of 64, 32 and 16, partial iterations of the loop, groups longer than a block of runs, and one
# group per row.
@every_scale
@pytest.mark.parametrize(
    ("k", "group"),
    [(128, 32), (640, 64), (640, 128), (1536, 256), (4608, 64), (2048, 1024), (4096, 4096), (3072, 1024)],
)
@pytest.mark.parametrize("m", [1, 3])
def test_every_group_and_run(m, k, group, double):
    dtype = FP16 if k == 640 else BF16
    if m > 1 and group > 256:
        spec = INT4._replace(k=k, group=group, code="nf4", rows=4, scale_dtype=torch.float32)
        assert "at most 256 numbers" in str(quantized.refuses(spec, here()))
        return
    for copies in (1,) if suite.gpu() is None or k > 640 else (1, 5):
        x = random(m, copies * k, dtype=dtype)
        check_gemm(x, 18, copies * k, group, "nf4", double=double, bias=random(18, dtype=dtype, seed=2))


@every_scale
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("m", [1, 5])
def test_norm_gate_and_residual_are_fused(m, form, double):
    n, k = 38, 640
    more: dict[str, Any] = {"activation": form.get("activation")}
    if "norm" in form:
        more["norm"] = ops.Norm(random(k, dtype=BF16, seed=3), 1e-5, True)
    if "residual" in form:
        more["residual"] = random(1, m, n // 2 if "activation" in form else n, dtype=BF16, seed=4)
    if "bias" in form:
        more["bias"] = random(n, dtype=BF16, seed=2)
    check_gemm(random(1, m, k, dtype=BF16), n, k, 64, "fp4", double=double, **more)


@pytest.mark.parametrize("code", [*CODES, "mxfp4"])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_value_is_decoded_at_every_position(m, dtype, code):
    """Every row of x has a single 1, so its results are one column of the weight, rounded to the dtype of x."""
    levels = torch.arange(16).repeat(8)[torch.randperm(128, generator=torch.Generator().manual_seed(0))].view(1, 128)
    levels = torch.cat([levels.roll(step, 1) for step in range(16)]).int()
    words, scale = four_bit.packed(levels, four_bit.run_length(128, 128)), torch.ones(16, 1)
    # MXFP4 has e2m1 codes and scales that are powers of two, here 1.
    if code == "mxfp4":
        code, scale = four_bit.E2M1, torch.full((16, 4), 127, dtype=torch.uint8)
    weight = torch.tensor(CODES[code])[levels].to(dtype)
    columns = torch.randperm(128, generator=torch.Generator().manual_seed(1)).view(-1, m)
    for places in columns[:8] if suite.gpu() is None else columns:
        x = torch.zeros(m, 128, dtype=dtype).scatter_(1, places[:, None], 1)
        output = routed("quantized_linear", x, words, scale, code=code)
        assert torch.equal(output, weight[:, places].T)


@pytest.mark.parametrize("m", [1, 4])
def test_zeros_extremes_and_nan_affect_only_their_row(m):
    words, rest = drawn(24, 256, 64)
    scale = rest["scale"]
    scale[3], scale[4], scale[5], scale[7, 2] = 0, 2.0**-100, 2.0**100, torch.nan
    x = random(m, 256, dtype=BF16)
    output = routed("quantized_linear", x, words, scale, code="nf4")
    assert output[:, 7].isnan().all() and torch.isfinite(output[:, :7]).all() and (output[:, 3] == 0).all()
    kept = [*range(7), *range(8, 24)]
    check(x, words[kept], scale[kept], code="nf4")


# every size with one code and dtype, and one size with every code and dtype
DEQUANTISED = [("nf4", BF16, *sizes) for sizes in ((128, 32), (640, 640), (4608, 64))]
DEQUANTISED += [(code, dtype, 640, 128) for code in CODES for dtype in (BF16, FP16, torch.float32)]


@every_scale
@pytest.mark.parametrize(("code", "dtype", "k", "group"), DEQUANTISED)
def test_dequantised_weights_equal_the_torch_tier(code, dtype, k, group, double):
    # With 4 rows and 72 groups per row, there are more scales than one factor of double quantisation covers.
    words, rest = drawn(4, k, group, double=double)
    scale, nested = rest["scale"], rest.get("nested")
    output = quantized._dequantized(words, scale, dtype, None, code, *(nested or (None, None)))
    expected = dequantize_groups(words, scale, dtype, None, code, nested)
    # A fused multiply-add of the scale rounds only once.
    if double:
        torch.testing.assert_close(output, expected, rtol=2.01 * torch.finfo(dtype).eps, atol=0)
    else:
        assert_same(output, expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("m", [1, 5, 17, 64])
def test_scales_may_be_powers_of_two(m, form):
    """The scales have the format of MXFP4, and one of them is NaN."""
    n, k = 38, 640 if suite.gpu() is None or m > 1 else 4736
    words, _ = drawn(n, k, 32)
    scale = torch.randint(118, 126, (n, k // 32), generator=torch.Generator().manual_seed(m)).to(torch.uint8)
    scale[0, 3], scale[1] = 255, 0
    x = random(m, k, dtype=BF16)
    more: dict[str, Any] = {"activation": form.get("activation")}
    if "residual" in form:
        more["residual"] = random(m, n // 2 if "activation" in form else n, dtype=BF16, seed=4)
    output = routed("quantized_linear", x, words, scale, code="e2m1", **more)
    assert output[:, 0].isnan().all() and torch.isfinite(output[:, 1:]).all()
    scale[0, 3] = 120
    check(x, words, scale, None, code="e2m1", **more)


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32], ids=str)
@pytest.mark.parametrize("k", [128, 640, 4608])
def test_every_power_of_two_is_a_valid_scale(k, dtype):
    n = 2 if k == 4608 else 16
    words, _ = drawn(n, k, 32)
    scale = (torch.arange(n * k // 32) % 255).to(torch.uint8).view(n, -1)
    output = quantized._dequantized(words, scale, dtype, None, "e2m1", None, None)
    assert_same(output, dequantize_groups(words, scale, dtype, code="e2m1"))


def test_quantized_linear_compiles_into_one_graph():
    words, rest = drawn(32, 128, 64, double=True)

    def function(x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, *nested: torch.Tensor) -> torch.Tensor:
        return ops.quantized_linear(x, words, scale, code="nf4", nested=Nested(*nested))

    for m, name in ((2, "quantized_linear"), (70, "dequantize")):
        x = random(m, 128, dtype=BF16)
        assert f"hf_rocm.triton_{name}.default" in compiled_once(function, x, words, rest["scale"], *rest["nested"])


@every_code
@pytest.mark.parametrize("scales", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize(("name", "rows"), [(quantized.NAME, 1), (quantized.DEQUANTIZE, 0)])
def test_the_first_use_check_passes(name, rows, scales, code):
    n = 32 if rows or suite.gpu() is not None else 8
    spec = INT4._replace(group=64, k=256, n=n, rows=rows, scale_dtype=scales, code=code)
    assert probe_cases.check("quantized_linear", "triton", name, spec) is None


def test_slices_of_nested_scales_are_decoded_as_in_the_whole_tensor():
    """Slices that begin at a multiple of 256 scales are decoded as in the whole tensor."""
    _, rest = drawn(200, 512, 64, double=True)
    whole = rest["nested"].decoded(rest["scale"])
    for start, stop in ((0, 32), (32, 200), (96, None)):
        rows = slice(start, stop)
        assert torch.equal(rest["nested"].of_rows(rows, 8).decoded(rest["scale"][rows]), whole[rows])
    assert operation.PER_FACTOR == 256 and not torch.equal(rest["nested"].decoded(rest["scale"][1:]), whole[1:])


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("half", [0, 1])
def test_nvidias_instructions_look_up_two_words_at_a_time(half, code):
    """This PTX is executed here because it occurs neither in the interpreter nor in AMD's machine code."""
    from hf_rocm.ops.triton.kernels import codes

    words = torch.tensor([0x76543210, 0xFEDCBA98 - 2**32, 0x13579BDF, -1]).repeat(2, 1).tolist()
    words[1].reverse()
    for dtype in (BF16, FP16):
        numbers = four_bit.table(code, dtype, torch.device("cpu")).view(torch.int16).tolist()
        low, low_end, high, high_end = four_bit.table_bytes(code, dtype, torch.device("cpu")).flatten().tolist()
        for pair in zip(*words, strict=True):
            signed = code in four_bit.SIGNED
            operands = [*(word & 0xFFFFFFFF for word in pair), 16 * half, 16 * half]
            for byte in (low, high, high_end, low_end):
                operands += [byte % 2**64] * 2
            results = execute(codes._pairs(signed).split("\n")[2:-1], operands[: 10 if signed else 12])
            for place in range(4):
                picked = [numbers[word >> (4 * (4 * half + place)) & 0xF] & 0xFFFF for word in pair]
                assert results[place] == picked[0] | picked[1] << 16


SIMPLE = {"and.b32": operator.and_, "or.b32": operator.or_, "shl.b32": operator.lshift, "shr.u32": operator.rshift}


def execute(lines: list[str], operands: list[int], count: int = 4) -> list[int]:
    """Execute PTX instructions. Returns their results."""
    values = {f"${index}": value for index, value in enumerate([0] * count + operands)}
    for line in lines:
        name, rest = line.rstrip(";").split(" ", 1)
        if name == "mov.b64":
            halves, source = rest.rsplit(", ", 1)
            first, second = halves.strip("{}").split(", ")
            values[first], values[second] = values[source] & 0xFFFFFFFF, values[source] >> 32
            continue
        target, *sources = rest.split(", ")
        a, b, *more = (values[source] if source in values else int(source, 0) for source in sources)
        if name == "prmt.b32":
            stored = (b << 32 | a).to_bytes(8, "little")
            places = [more[0] >> (4 * byte) & 0xF for byte in range(4)]
            # Places 8 to 15 raise an IndexError.
            result = int.from_bytes(bytes(stored[place] for place in places), "little")
        elif name == "lop3.b32":
            # 0xE4: the operand c selects between the bits of a and b
            assert more[1] in (0xE4, 0xEA)
            result = a & more[0] | b & ~more[0] if more[1] == 0xE4 else a & b | more[0]
        else:
            result = SIMPLE[name](a, b)
        values[target] = result & 0xFFFFFFFF
    return [values[f"${index}"] for index in range(count)]
