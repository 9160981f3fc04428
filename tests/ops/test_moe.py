"""Routed experts in the torch and eager tiers, in every layout, compared with float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_rocm import ops, options
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops import moe, moe_torch, probe, probe_cases, registry
from hf_rocm.ops.moe_shuffled import PLAIN
from hf_rocm.ops.specs.experts import ExpertsCall, ExpertsSpec
from tests.tolerance import assert_as_good_as_eager

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# name → (T, E, k, H, I)
SHAPES = {
    "one token": (1, 8, 2, 32, 16),
    "odd": (63, 5, 3, 32, 48),
    "every expert": (3, 4, 4, 16, 8),
    "many experts": (7, 32, 2, 16, 16),
    "one expert each": (9, 4, 1, 24, 40),
}
LAYOUTS = {
    "plain": {},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "biases": {"biases": True},
    "gpt_oss": {
        "biases": True,
        "transposed": True,
        "interleaved": True,
        "activation": "clamped_swiglu",
        "limit": 0.5,
        "alpha": 1.7,
    },
    "llama4": {"transposed": True, "weigh_input": True},
}
IMPLEMENTATIONS = {
    "grouped_mm": moe_torch.grouped,
    "gathered weights, bmm": moe_torch.gathered,
    "sorted tokens, loop": moe_torch.sorted_loop,
}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
needs_grouped_mm = pytest.mark.skipif(moe_torch._grouped_mm is None, reason="not run: this PyTorch has no grouped_mm")


def drawn(shape, dtype, layout, weights_dtype=torch.float32, seed=0):
    """Returns the positional tensors and the keywords of a call."""
    tokens, experts, top, hidden, intermediate = shape
    generator = torch.Generator().manual_seed(seed)
    layout = dict(layout)
    biased, transposed = layout.pop("biases", False), layout.get("transposed", False)

    def random(*size):
        return torch.randn(*size, generator=generator).to(dtype)

    sizes = [(2 * intermediate, hidden), (hidden, intermediate)]
    stacked = [random(experts, *(size[::-1] if transposed else size)) * size[1] ** -0.5 for size in sizes]
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top]
    weights = torch.rand(tokens, top, generator=generator).to(weights_dtype)
    biases = {"gate_up_bias": random(experts, sizes[0][0]), "down_bias": random(experts, hidden)} if biased else {}
    return (random(tokens, hidden), *stacked, ids, weights), {**layout, **biases}


def doubled(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def eager(tensors, keywords):
    with options.override(tiers={"experts": "eager"}):
        return ops.experts(*tensors, **keywords)


def reference(tensors, keywords):
    return eager([doubled(tensor) for tensor in tensors], {key: doubled(value) for key, value in keywords.items()})


def arguments_of(tensors, keywords):
    """Returns the arguments of the same call as an implementation receives them."""
    keywords = dict(keywords)
    biases = keywords.pop("gate_up_bias", None), keywords.pop("down_bias", None)
    return ExpertsCall(*tensors, *biases, PLAIN._replace(**keywords))


@every_dtype
@every_layout
@every_shape
def test_the_torch_tier_is_as_accurate_as_eager(dtype, layout, shape):
    tensors, keywords = drawn(shape, dtype, layout)
    with options.override(tiers={"experts": "torch"}), ops.recording() as routes:
        output = ops.experts(*tensors, **keywords)
    assert [(route.operation, route.tier) for route in routes] == [("experts", "torch")]
    assert_as_good_as_eager(output, eager(tensors, keywords), reference(tensors, keywords))


@every_dtype
@every_layout
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_implementation_is_as_accurate_as_eager(name, dtype, layout):
    if name == "grouped_mm" and moe_torch._grouped_mm is None:
        pytest.skip("not run: this PyTorch has no grouped_mm")
    tensors, keywords = drawn(SHAPES["odd"], dtype, layout)
    output = IMPLEMENTATIONS[name](arguments_of(tensors, keywords))
    assert_as_good_as_eager(output, eager(tensors, keywords), reference(tensors, keywords))


def test_the_oracle_follows_the_formula():
    """Compute two experts manually: silu(gate) · up, the down projection, the routing weights, and the sum."""
    x = torch.tensor([[1.0, 2.0]])
    gate_up = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 1.0]]])
    down = torch.tensor([[[1.0], [0.0]], [[0.5], [2.0]]])
    first, second = F.silu(torch.tensor(1.0)) * 2, F.silu(torch.tensor(2.0)) * 3
    expected = torch.stack((0.25 * first + 0.75 * 0.5 * second, 0.75 * 2 * second))[None]
    for tier in ("torch", "eager"):
        with options.override(tiers={"experts": tier}):
            output = ops.experts(x, gate_up, down, torch.tensor([[1, 0]]), torch.tensor([[0.75, 0.25]]))
        torch.testing.assert_close(output, expected)


@needs_grouped_mm
@every_dtype
def test_grouped_mm_serves_supported_sizes(dtype):
    tensors, keywords = drawn(SHAPES["odd"], dtype, {})
    with ops.recording() as routes:
        ops.experts(*tensors, **keywords)
    assert routes[0].name == "grouped_mm"


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((4, 4, 2, 20, 16), torch.bfloat16, "got hidden size 20"),
        ((4, 4, 2, 16, 12), torch.bfloat16, "got intermediate size 12"),
        ((4, 4, 2, 16, 16), torch.float64, "fp32, bf16 or fp16"),
    ],
    ids=["hidden", "intermediate", "dtype"],
)
def test_the_loop_serves_calls_that_grouped_mm_refuses(shape, dtype, reason):
    tensors, keywords = drawn(shape, dtype, {}, weights_dtype=dtype)
    with ops.recording() as routes:
        output = ops.experts(*tensors, **keywords)
    assert routes[0].name == "sorted tokens, loop"
    if moe_torch._grouped_mm is not None:
        choice = registry.operations()["experts"].choose(moe.specification(arguments_of(tensors, {})))
        assert any(reason in refusal.reason for refusal in choice.refusals)
    assert_as_good_as_eager(output, eager(tensors, keywords), reference(tensors, keywords))


@pytest.mark.parametrize("layout", ["plain", "gpt_oss", "llama4"])
@pytest.mark.parametrize("name", ["grouped_mm", "sorted tokens, loop"])
def test_gradients_equal_those_of_eager(name, layout):
    if name == "grouped_mm" and moe_torch._grouped_mm is None:
        pytest.skip("not run: this PyTorch has no grouped_mm")
    tensors, keywords = drawn(SHAPES["odd"], torch.float32, LAYOUTS[layout])

    def gradients(function, convert):
        inputs = [
            convert(argument).clone().requires_grad_()
            if argument is not None and argument.is_floating_point()
            else argument
            for argument in arguments_of(tensors, keywords)[:-1]
        ]
        output = function(ExpertsCall(*inputs, form=arguments_of(tensors, keywords).form))
        ramp = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
        differentiable = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        return torch.autograd.grad((output * ramp).sum(), differentiable)

    actual = gradients(IMPLEMENTATIONS[name], torch.Tensor.float)
    eager_gradients = gradients(moe_torch.eager, torch.Tensor.float)
    expected = gradients(moe_torch.eager, torch.Tensor.double)
    assert len(actual) == (6 if layout == "gpt_oss" else 4)
    for gradient, eager_gradient, exact in zip(actual, eager_gradients, expected, strict=True):
        assert_as_good_as_eager(gradient, eager_gradient, exact)


def test_with_gradients_no_weights_are_gathered():
    spec = ExpertsSpec(*key_of("one token"))._replace(grad=True)
    assert "gradients" in moe_torch.gathered_refuses(spec, registry.describe(torch.device("meta")))


def key_of(shape, dtype=torch.bfloat16):
    tensors, _ = drawn(SHAPES[shape], dtype, {})
    return moe.specification(arguments_of(tensors, {}))


@pytest.mark.parametrize(("tokens", "bound"), [(0, 32), (1, 32), (16, 32), (17, 64), (32, 64), (33, moe.MANY)])
def test_the_bound_on_pairs_depends_on_the_number_of_tokens(tokens, bound):
    tensors, _ = drawn((tokens, 4, 2, 16, 8), torch.bfloat16, {})
    spec = ExpertsSpec(*moe.specification(arguments_of(tensors, {})))
    assert spec.pairs == bound
    reason = moe_torch.gathered_refuses(spec, registry.describe(torch.device("meta")))
    assert (reason is None) is (bound == 32)
    assert reason is None or "more than 32 token-expert pairs" in reason


def test_kernels_are_preferred_to_copies():
    """The kernels come before the implementation that copies the weights of the selected experts."""
    tiers = [(route.tier, route.name) for route in registry.operations()["experts"].implementations]
    assert tiers[:3] == [("aiter", "fused_moe"), ("triton", "chosen_experts"), ("torch", "gathered weights, bmm")]


@pytest.mark.parametrize(("size", "smaller"), [(48, 48), (512, 512), (2880, 832), (2048, 512), (5120, 512)])
def test_a_check_uses_small_sizes_with_the_divisibility_of_the_model(size, smaller):
    spec = ExpertsSpec(*key_of("odd"))._replace(hidden=size)
    assert ExpertsSpec(*probe_cases.kind("experts", spec)).hidden == smaller


@needs_grouped_mm
def test_nothing_is_read_back_from_the_device():
    """On the meta device, a read-back would raise an error. Calls without read-backs can be recorded in a graph."""
    tensors, _ = drawn(SHAPES["odd"], torch.bfloat16, {})
    on_meta = arguments_of([tensor.to("meta") for tensor in tensors], {})
    for name in ("grouped_mm", "gathered weights, bmm"):
        assert IMPLEMENTATIONS[name](on_meta).shape == tensors[0].shape
    with pytest.raises((NotImplementedError, RuntimeError)):
        moe_torch.sorted_loop(on_meta)


def test_zero_tokens_give_an_empty_output():
    tensors, keywords = drawn((0, 4, 2, 16, 16), torch.bfloat16, {})
    for tier in ("torch", "eager"):
        with options.override(tiers={"experts": tier}):
            assert ops.experts(*tensors, **keywords).shape == (0, 16)


def test_unselected_experts_are_not_read():
    """The weights of unselected experts are NaN."""
    (x, gate_up, down, ids, weights), _ = drawn((5, 6, 2, 16, 16), torch.float32, {})
    ids = torch.tensor([[1, 3]] * 5)
    expected = eager((x, gate_up, down, ids, weights), {})
    gate_up[[0, 2, 4, 5]] = torch.nan
    down[[0, 2, 4, 5]] = torch.nan
    for call in IMPLEMENTATIONS.values():
        if call is moe_torch.grouped and moe_torch._grouped_mm is None:
            continue
        output = call(arguments_of((x, gate_up, down, ids, weights), {}))
        torch.testing.assert_close(output, expected)


@needs_grouped_mm
def test_it_compiles_into_one_graph():
    tensors, _ = drawn(SHAPES["odd"], torch.bfloat16, {})
    compiled = torch.compile(lambda *arguments: ops.experts(*arguments), fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors), ops.experts(*tensors))


def test_the_aiter_tier_requires_shuffled_weights(monkeypatch):
    tensors, keywords = drawn(SHAPES["odd"], torch.bfloat16, {})
    with options.override(tiers={"experts": "aiter"}), pytest.raises(TierUnavailable, match="aiter tier"):
        ops.experts(*tensors, **keywords)


def test_shuffled_weights_give_the_same_results():
    (x, gate_up, down, ids, weights), _ = drawn((9, 4, 2, 64, 32), torch.bfloat16, {})
    first, second = ops.shuffle_experts(gate_up), ops.shuffle_experts(down)
    assert not torch.equal(first.data, gate_up) and first.data.shape == gate_up.shape
    for expert in range(4):
        assert torch.equal(first.data[expert], ops.shuffle(gate_up[expert]).data)
    with ops.recording() as routes:
        output = ops.shuffled_experts(x, first, second, ids, weights)
    assert [(route.operation, route.tier) for route in routes] == [("shuffled_experts", "torch")]
    expected = reference((x, gate_up, down, ids, weights), {})
    assert_as_good_as_eager(output, eager((x, gate_up, down, ids, weights), {}), expected)


@pytest.mark.parametrize("shape", [(4, 24, 32), (16, 32)], ids=str)
def test_experts_that_would_share_a_tile_are_not_shuffled(shape):
    with pytest.raises(OptionError, match="can't be shuffled"):
        ops.shuffle_experts(torch.zeros(shape, dtype=torch.bfloat16))


def test_the_probe_detects_a_wrong_implementation(monkeypatch):
    spec = probe_cases.kind("experts", ExpertsSpec(*key_of("odd")))
    assert probe_cases.check("experts", "torch", "sorted tokens, loop", spec) is None
    operation = registry.operations()["experts"]
    broken = registry.Implementation("torch", "broken", lambda *_: None, lambda call: moe_torch.eager(call) * 1.1)
    monkeypatch.setattr(operation, "implementations", [*operation.implementations, broken])
    assert "wrong by" in probe_cases.check("experts", "torch", "broken", spec)


@needs_grouped_mm
@every_dtype
@pytest.mark.parametrize("grad", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_grouped_mm_passes_its_check(layout, grad, dtype):
    """The check passes although the gradient of a bias is a sum over hundreds of rows.

    The gradient of a clamp is discontinuous at the limit, so the check must not use values near it.
    """
    spec = ExpertsSpec(*key_of("odd"))._replace(dtype=dtype, weight_dtype=dtype, grad=grad)
    layout = {name: value for name, value in layout.items() if name not in ("limit", "alpha")}
    spec = spec._replace(bias=layout.pop("biases", False), **layout)
    assert probe_cases.check("experts", "torch", "grouped_mm", probe_cases.kind("experts", spec)) is None


@needs_grouped_mm
def test_the_check_of_gradients_clamps_some_values_and_not_others():
    spec = ExpertsSpec(*key_of("odd"))._replace(activation="clamped_swiglu", bias=True, grad=True)
    for case in moe.cases(moe.kind(spec)):
        x, gate_up, _, _, _, bias, _ = (tensor if tensor is None else tensor.double() for tensor in case.tensors)
        values = torch.einsum("th,enh->ten", x, gate_up) + bias
        limit = case.others[0].limit
        assert (values.abs() - limit).abs().min() > 0.1
        assert (values > limit).any() and (values < -limit).any() and (values.abs() < limit).any()


@needs_grouped_mm
def test_a_check_that_fails_with_gradients_affects_only_calls_with_gradients(monkeypatch):
    """An implementation that failed with gradients still serves calls without gradients."""
    operation = registry.operations()["experts"]
    check = probe_cases.check
    monkeypatch.setattr(
        probe_cases, "check", lambda *call: "it is wrong" if ExpertsSpec(*call[3]).grad else check(*call)
    )
    spec = ExpertsSpec(*key_of("odd"))._replace(dtype=torch.float16, weight_dtype=torch.float16)
    probe.forget()
    operation.forget()
    try:
        with pytest.warns(RuntimeWarning, match="grouped_mm for float16 with gradients"):
            assert operation.choose(tuple(spec._replace(grad=True))).implementation.name == "sorted tokens, loop"
        assert operation.choose(tuple(spec)).implementation.name == "grouped_mm"
    finally:
        probe.forget()
        operation.forget()


def test_invalid_arguments_are_refused():
    tensors, _ = drawn(SHAPES["odd"], torch.float32, {})
    with pytest.raises(OptionError, match="does not support the activation"):
        ops.experts(*tensors, activation="relu")
    with pytest.raises(OptionError, match="both biases"):
        ops.experts(*tensors, gate_up_bias=torch.zeros(5, 96))
