"""8-bit GEMMs with aiter: the real package with stand-ins, every recorded release, and refusals."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from hf_rocm import ops, options
from hf_rocm.device import Device
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops.aiter import quantized
from hf_rocm.ops.eight_bit import FP8, FP8_FNUZ, INT8, quantize_rows, shuffle_rows, unshuffle_rows
from hf_rocm.ops.quantized_torch import eager_linear
from hf_rocm.ops.specs.quantized import QuantizedCall, QuantizedSpec
from tests import eight_bit
from tests.aiter import recorded
from tests.tolerance import assert_as_good_as_eager

BF16, FP16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
NEWEST, FIRST_SERVED = "0.1.21.dev46", Version("0.1.6.post2")
PLAIN, WHOLE_TILES = (40, 48), (256, 512)


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(shape, n, k, dtype, format, bias):
    x = random(*shape, k, dtype=dtype)
    if x.numel():
        # Dividing this row by its largest magnitude would give NaN.
        x.view(-1, k)[0] = 0
    weight, scale = quantize_rows(random(n, k, dtype=dtype, seed=1), format)
    return x, weight, scale.flatten(), random(n, dtype=dtype, seed=2) if bias else None


def run(kernels, x, weight, scale, bias, shuffled):
    """Run the op in the aiter tier. Returns (output, name of its route, calls that reached a kernel)."""
    del kernels.CALLS[:]
    given = shuffle_rows(weight) if shuffled else weight
    with options.override(tiers={"linear": "aiter"}, probe=False), ops.recording() as routes:
        output = ops.quantized_linear(x, given, scale, bias, shuffled=shuffled)
    assert [(route.operation, route.tier) for route in routes] == [("quantized_linear", "aiter")]
    return output, routes[0].name, list(kernels.CALLS)


def assert_right(output, x, weight, scale, bias):
    format = weight.dtype
    doubled = (x.double(), weight.double(), scale.double(), None if bias is None else bias.double())
    expected = eager_linear(QuantizedCall(*doubled, format, False))
    assert_as_good_as_eager(output, eager_linear(QuantizedCall(x, weight, scale, bias, format, False)), expected)


@pytest.mark.usefixtures("kernels", "mi300x")
class TestRealPackage:
    @pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("format", [INT8, FP8_FNUZ], ids=str)
    @pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (), (0,)], ids=str)
    def test_gemm_a8w8(self, kernels, shape, format, bias, dtype):
        given = tensors(shape, *PLAIN, dtype, format, bias)
        output, name, calls = run(kernels, *given, shuffled=False)
        assert name == "gemm_a8w8" and output.shape == (*shape, PLAIN[0]) and output.dtype == dtype
        if not output.numel():
            assert calls == []
            return
        assert [call.kernel for call in calls] == ["gemm_a8w8"]
        assert_right(output, *given)

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("m", [1, 33, 0])
    def test_gemm_a8w8_bpreshuffle(self, kernels, m, bias):
        given = tensors((m,), *WHOLE_TILES, BF16, FP8_FNUZ, bias)
        output, name, calls = run(kernels, *given, shuffled=True)
        assert name == "gemm_a8w8_bpreshuffle" and output.shape == (m, WHOLE_TILES[0])
        assert [call.kernel for call in calls] == ["gemm_a8w8_bpreshuffle"] * (m > 0)
        if m:
            assert_right(output, *given)

    def test_the_shuffled_order_matches_aiter(self, kernels):
        from aiter.ops.shuffle import shuffle_weight

        weight, _ = quantize_rows(random(32, 64, dtype=BF16), FP8_FNUZ)
        actual = shuffle_rows(weight).view(torch.uint8)
        assert torch.equal(shuffle_weight(weight, layout=(16, 16)).view(torch.uint8), actual)
        assert torch.equal(unshuffle_rows(shuffle_rows(weight)).view(torch.uint8), weight.view(torch.uint8))

    def test_the_kernel_is_one_op_of_a_compiled_graph(self, kernels):
        x, weight, scale, bias = tensors((5,), *PLAIN, BF16, INT8, True)
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph

        with options.override(tiers={"linear": "aiter"}, probe=False), torch.no_grad():
            compiled = torch.compile(ops.quantized_linear, backend=backend, fullgraph=True)
            output = compiled(x, weight, scale, bias)
        assert_right(output, x, weight, scale, bias)
        (graph,) = graphs
        assert sum("aiter_quantized_linear" in str(node.target) for node in graph.graph.nodes) == 1

    def test_a_broken_kernel_is_found_and_pytorch_is_used(self, kernels, break_kernel):
        break_kernel("gemm_a8w8:nan")
        x, weight, scale, bias = tensors((5,), *PLAIN, BF16, INT8, False)
        with (
            pytest.warns(RuntimeWarning, match="quantized_linear won't use aiter's gemm_a8w8 for .* in this process"),
            ops.recording() as routes,
        ):
            output = ops.quantized_linear(x, weight, scale)
        assert [route.name for route in routes] == [eight_bit.served_by(INT8, BF16)]
        assert_right(output, x, weight, scale, bias)

    def test_a_model_is_shuffled_in_place_and_runs_the_kernel(self, kernels):
        """Both kernels are first checked in a child process, which also has the stand-ins."""
        import hf_rocm
        from hf_rocm.ops import registry
        from hf_rocm.weights import eight_bit as quantizing

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantizing, "describe", registry.describe)
            patch.setattr(quantizing, "fp8_of", lambda device: FP8_FNUZ)
            block = torch.nn.ModuleList([torch.nn.Linear(512, 256), torch.nn.Linear(48, 48)]).to(BF16)
            model = torch.nn.Module()
            model.layers = block
            expected = [layer.weight.detach().clone() for layer in block]
            hf_rocm.quantize(model.eval(), "fp8", force=True)
            x = random(3, 512, dtype=BF16)
            with ops.recording() as routes:
                model.layers[0](x), model.layers[1](x[:, :48])
        assert [route.name for route in routes] == ["gemm_a8w8_bpreshuffle", "gemm_a8w8"]
        for layer, before in zip(model.layers, expected, strict=True):
            assert (layer.weight - before).abs().max() <= before.abs().max() / 2**4


@pytest.mark.parametrize("version", recorded.RELEASES)
@pytest.mark.parametrize(("format", "shuffled"), [(INT8, False), (FP8_FNUZ, False), (FP8_FNUZ, True)])
def test_every_release_serves_or_refuses_with_a_reason(recorded_as, version, format, shuffled):
    recorded_as(version)
    given = tensors((3,), *WHOLE_TILES, BF16, format, True)
    name = "gemm_a8w8_bpreshuffle" if shuffled else "gemm_a8w8"
    if Version(version) < FIRST_SERVED:
        with pytest.raises(TierUnavailable, match=f"amd-aiter {version} has no {name}"):
            run(recorded.kernels, *given, shuffled=shuffled)
        return
    output, route, calls = run(recorded.kernels, *given, shuffled=shuffled)
    assert route == name == calls[0].kernel
    assert_right(output, *given)


SPEC = QuantizedSpec(dtype=BF16, format=FP8_FNUZ, device=CPU, n=256, k=512, bias_dtype=None, shuffled=False)
SHUFFLED = SPEC._replace(shuffled=True)

REFUSALS = [
    (
        quantized.refuses,
        SPEC,
        {"dtype": torch.float32},
        "gemm_a8w8 returns fp16 or bf16 and needs a bias of its dtype, got ",
    ),
    (
        quantized.refuses,
        SPEC,
        {"bias_dtype": FP16},
        "gemm_a8w8 returns fp16 or bf16 and needs a bias of its dtype, got ",
    ),
    (
        quantized.refuses,
        SPEC,
        {"format": FP8},
        "aiter has no GEMM for torch.float8_e4m3fn on gfx942; it supports torch.float8_e4m3fnuz",
    ),
    (quantized.refuses, SPEC, {"shuffled": True}, "gemm_a8w8 reads weights in plain order"),
    (quantized.refuses, SPEC, {"k": 520}, "gemm_a8w8 needs K to be a multiple of 16 and N of 8, got 256 × 520"),
    (quantized.refuses, SPEC, {"n": 250}, "gemm_a8w8 needs K to be a multiple of 16 and N of 8, got 250 × 512"),
    (quantized.shuffled_refuses, SPEC, {}, "gemm_a8w8_bpreshuffle reads shuffled weights"),
    (quantized.shuffled_refuses, SHUFFLED, {"format": INT8}, "gemm_a8w8_bpreshuffle supports only fp8"),
    (
        quantized.shuffled_refuses,
        SHUFFLED,
        {"n": 128},
        "gemm_a8w8_bpreshuffle needs N and K to be multiples of 256 and K ≥ 512",
    ),
    (
        quantized.shuffled_refuses,
        SHUFFLED,
        {"k": 256},
        "gemm_a8w8_bpreshuffle needs N and K to be multiples of 256 and K ≥ 512",
    ),
]


@pytest.mark.parametrize(("refuses", "spec", "changes", "sentence"), REFUSALS)
def test_unsupported_calls_are_refused(recorded_as, refuses, spec, changes, sentence):
    recorded_as(NEWEST)
    device = Device("cuda", rocm=True, arch="gfx942")
    assert refuses(spec, device) is None or not changes
    result = refuses(spec._replace(**changes), device)
    assert result is not None and result.startswith(sentence)


def test_the_fp8_type_must_match_the_arch(recorded_as):
    recorded_as(NEWEST, "gfx90a")
    old, new = (Device("cuda", rocm=True, arch=arch) for arch in ("gfx90a", "gfx950"))
    assert quantized.refuses(SPEC, old) == "aiter has no GEMM for torch.float8_e4m3fnuz on gfx90a"
    assert quantized.refuses(SPEC._replace(format=INT8), old) is None
    assert quantized.refuses(SPEC._replace(format=FP8), new) is None
    reason = quantized.refuses(SPEC, new)
    assert reason == "aiter has no GEMM for torch.float8_e4m3fnuz on gfx950; it supports torch.float8_e4m3fn"
    assert "aiter needs an AMD GPU" in str(quantized.refuses(SPEC, Device("cpu", rocm=False)))
