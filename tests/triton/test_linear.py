"""linear and fused_linear in the Triton kernels, compared with float64 and with separate operations."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.device import Device
from hf_rocm.errors import OptionError, TierUnavailable
from hf_rocm.ops.linear import composed, eager_fused_linear, eager_linear
from hf_rocm.ops.specs.linear import FusedLinearSpec, LinearSpec
from hf_rocm.ops.triton import launch as launching
from hf_rocm.ops.triton import linear
from hf_rocm.weights.linear_routing import route_head
from tests.amdgcn import suite
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import assert_independent, compiled_once, exact, here, random, routed, shifted, sizes

every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@every_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "n"), [((1, 16), 16), ((1, 1, 63), 37), ((2, 131), 20), ((3, 5, 40), 33), ((17, 64), 48)], ids=str
)
def test_linear(shape, n, bias, dtype):
    for m, columns, k in sizes(prod(shape[:-1]), n, shape[-1]):
        x, weight = random(m, k, dtype=dtype), random(columns, k, dtype=dtype, seed=1) * k**-0.5
        x = x.view(shape) if k == shape[-1] else x
        added = random(columns, dtype=dtype, seed=2) if bias else None
        expected = eager_linear(x.double(), weight.double(), None if added is None else added.double())
        assert_as_good_as_eager(routed("linear", x, weight, added), eager_linear(x, weight, added), expected)
        whole, weight = exact(m, columns, k, dtype)
        added = torch.arange(columns).remainder(8).mul(2).to(dtype) if bias else None
        expected = eager_linear(whole.double(), weight.double(), None if added is None else added.double())
        assert torch.equal(routed("linear", whole, weight, added), expected.to(dtype))
        assert_independent(lambda x, weight, added=added: routed("linear", x, weight, added), whole, weight)


@pytest.mark.parametrize("rows", [*range(1, 19), 24, 31, 32])
def test_every_number_of_rows_is_as_accurate_as_eager(rows):
    for m, n, k in sizes(rows, 21, 48):
        x, weight = random(m, k, dtype=torch.bfloat16), random(n, k, dtype=torch.bfloat16, seed=1)
        expected = eager_linear(x.double(), weight.double(), None)
        assert_as_good_as_eager(routed("linear", x, weight), eager_linear(x, weight, None), expected)
        whole, weight = exact(m, n, k, torch.bfloat16)
        assert torch.equal(routed("linear", whole, weight), (whole.double() @ weight.double().t()).bfloat16())


FORMS: list[dict[str, Any]] = [
    {"norm": False},
    {"norm": True},
    {"residual": True},
    {"activation": "silu"},
    {"activation": "gelu"},
    {"activation": "gelu_tanh", "norm": True, "residual": True, "bias": True},
    {"activation": "silu", "norm": False, "residual": True},
]


@every_dtype
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("m", [1, 5, 20])
def test_norm_activation_and_residual_are_fused(form, m, dtype):
    for rows, n, k in sizes(m, 38, 67):
        arguments, keywords = call(rows, dtype, n=n, k=k, **form)
        as_good_as_eager(arguments, keywords)
        check_independence(arguments, keywords)


def as_good_as_eager(arguments: tuple[torch.Tensor, ...], keywords: dict[str, Any]) -> None:
    output = routed("fused_linear", *arguments, **keywords)
    wide = flattened(*(argument.double() for argument in arguments), **keywords)
    assert_as_good_as_eager(output, eager_fused_linear(*flattened(*arguments, **keywords)), eager_fused_linear(*wide))


@pytest.mark.parametrize("form", [{}, {"residual": True}, {"activation": "silu"}], ids=str)
@pytest.mark.parametrize("m", [1, 5, 20])
def test_blocks_may_divide_the_sizes(m, form):
    """This is the common case in models: nothing is masked along K."""
    arguments, keywords = call(m, torch.bfloat16, k=1024, **form)
    as_good_as_eager(arguments, keywords)
    check_independence(arguments, keywords)
    if "activation" not in form:
        x, weight = exact(m, 38, 1024, torch.bfloat16)
        residual = torch.arange(38).remainder(8).mul(2).expand(m, 38).bfloat16() if form else None
        expected = (x.double() @ weight.double().t()).bfloat16()
        output = routed("fused_linear", x, weight, residual=residual)
        assert torch.equal(output, expected if residual is None else expected + residual)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_rounds_like_separate_layers(form):
    """Sums are exact in fp32, so results differ from separate operations only if the rounding points differ."""
    arguments, keywords = call(2, torch.bfloat16, whole=True, **form)
    with options.override(tiers={"rms_norm": "triton", "act_and_mul": "triton"}), torch.no_grad():
        expected = composed(*flattened(*arguments, **keywords))
    assert torch.equal(routed("fused_linear", *arguments, **keywords), expected)
    # Run several full blocks, whose sums are not exact.
    if suite.gpu() is not None:
        as_good_as_eager(*call(2, torch.bfloat16, k=1091, **form))


@every_dtype
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"norm": False},
        {"norm": True},
        {"activation": "silu", "residual": True},
        {"activation": "silu", "norm": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("n", "k"), [(18, 2048), (18, 2560), (38, 4096), (18, 4224), (18, 8192), (18, 9730)])
def test_every_tile_for_one_row(n, k, form, dtype):
    """The tile depends on K. In some, a block of the weight is loaded before the previous one is multiplied."""
    arguments, keywords = call(1, dtype, n=n, k=k, **form)
    as_good_as_eager(arguments, keywords)


@every_dtype
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("part", ["x", "weight", "norm", "fp32 norm"])
def test_rows_that_can_not_be_read_in_pairs_have_the_same_result(part, one_plus, dtype, monkeypatch):
    """Tensors that begin between two words, and a norm's weight in another dtype."""
    if part == "fp32 norm" and not one_plus:
        pytest.skip("not run: the kernel takes norms in another dtype only if they multiply by (1 + w)")
    (x, weight, bias), keywords = call(1, dtype, norm=one_plus, residual=True, bias=True, k=130)
    used = []
    monkeypatch.setattr(linear, "in_pairs", lambda *sizes: used.append(launching.in_pairs(*sizes)) or used[-1])
    expected = routed("fused_linear", x, weight, bias, **keywords)
    norm = keywords["norm"]
    if part == "fp32 norm":
        keywords["norm"] = norm._replace(weight=norm.weight.float())
    elif part == "norm":
        keywords["norm"] = norm._replace(weight=shifted(norm.weight))
    else:
        x, weight = (shifted(tensor) if name == part else tensor for name, tensor in (("x", x), ("weight", weight)))
    output = routed("fused_linear", x, weight, bias, **keywords)
    assert used == [True, False]
    torch.testing.assert_close(output, expected, rtol=2 * torch.finfo(dtype).eps, atol=0.01)


def test_one_operation_replaces_all_parts():
    arguments, keywords = call(1, torch.bfloat16, norm=False, activation="silu", residual=True)
    with options.override(tiers={"linear": "triton"}), ops.recording() as routes:
        ops.fused_linear(*arguments, **keywords)
    assert [(route.operation, route.tier, route.name) for route in routes] == [("fused_linear", "triton", linear.NAME)]


@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_row_is_normalised_by_the_kernel_that_multiplies_it(one_plus, dtype, monkeypatch):
    def norm_kernel(*arguments):
        raise AssertionError("the norm was launched separately")

    monkeypatch.setattr(linear.norm, "rms_norm", norm_kernel)
    for activation in (None, "gelu_tanh"):
        form: dict[str, Any] = {"norm": one_plus, "activation": activation, "residual": True, "bias": True}
        as_good_as_eager(*call(1, dtype, k=1091, **form))
        arguments, keywords = call(2, dtype, **form)
        with pytest.raises(AssertionError, match="separately"):
            routed("fused_linear", *arguments, **keywords)


def test_the_product_of_a_large_row_and_the_norms_weight_does_not_overflow_in_fp16():
    (_, weight), keywords = call(1, torch.float16, norm=False, k=512)
    x = torch.full((1, 512), 40000.0, dtype=torch.float16)
    keywords["norm"] = ops.Norm(torch.full((512,), 4.0, dtype=torch.float16), 1e-5, False)
    assert torch.isfinite(routed("fused_linear", x, weight, **keywords)).all()
    as_good_as_eager((x, weight), keywords)


@pytest.mark.parametrize("tiers", [{"rms_norm": "torch"}, {"act_and_mul": "torch"}, {"linear": "torch"}], ids=str)
def test_a_part_with_a_named_tier_runs_separately(tiers):
    arguments, keywords = call(1, torch.bfloat16, norm=False, activation="silu")
    with options.override(tiers=tiers), ops.recording() as routes:
        output = ops.fused_linear(*arguments, **keywords)
        (name,) = tiers
    assert [route.operation for route in routes] == ["fused_linear", "rms_norm", "linear", "act_and_mul"]
    assert next(route.tier for route in routes if route.operation == name) == "torch"
    assert torch.isfinite(output).all()


def test_a_users_linear_kernel_is_not_skipped():
    arguments, keywords = call(1, torch.bfloat16, norm=False)
    # The registration must invalidate this cached choice.
    ops.fused_linear(*arguments, **keywords)
    remove = ops.register("linear", name="mine", call=torch.nn.functional.linear, refuses=lambda spec, device: None)
    try:
        with ops.recording() as routes:
            ops.fused_linear(*arguments, **keywords)
    finally:
        remove()
    assert ("linear", "user") in [(route.operation, route.tier) for route in routes]


def test_it_compiles_into_one_graph():
    (x, weight), keywords = call(2, torch.bfloat16, norm=True, activation="silu", residual=True, k=1091)

    def function(x, weight):
        return ops.fused_linear(x, weight, **keywords)

    assert any("triton_fused_linear" in entry for entry in compiled_once(function, x, weight))


def test_only_few_rows_are_served():
    x, weight = random(33, 64, dtype=torch.bfloat16), random(32, 64, dtype=torch.bfloat16)
    with ops.recording() as routes:
        for rows in (33, 32, 17, 1):
            ops.linear(x[:rows], weight)
    assert [route.tier for route in routes] == ["torch", "triton", "triton", "triton"]
    assert "M > 32" in str(linear.refuses(spec(rows=0), here()))


def test_an_output_head_runs_here_for_few_rows_and_in_pytorch_for_many():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(64, 32, dtype=torch.bfloat16)

        def get_output_embeddings(self):
            return self.head

    model = Model()
    assert route_head(model) is None
    x = random(33, 64, dtype=torch.bfloat16)
    with ops.recording() as routes:
        with torch.no_grad():
            many, few = model.head(x), model.head(x[:1])
            stock = torch.nn.functional.linear(x, model.head.weight, model.head.bias)
        # With gradients, PyTorch runs, and no route is recorded.
        model.head(x[:1])
    assert [(route.operation, route.tier) for route in routes] == [("linear", "triton")]
    assert torch.equal(many, stock)
    with torch.no_grad():
        wide = [tensor.double() for tensor in (x[:1], model.head.weight, model.head.bias)]
        assert_as_good_as_eager(few, stock[:1], torch.nn.functional.linear(*wide))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"grad": True}, "no gradient"),
        ({"dtype": torch.float32, "weight_dtype": torch.float32}, "not torch.float32"),
        ({"weight_dtype": torch.float16}, "one dtype"),
        ({"contiguous": False}, "contiguous weight"),
        ({"n": 8}, "at least 16"),
    ],
    ids=str,
)
def test_unsupported_calls_are_refused(change, reason):
    assert reason in str(linear.refuses(spec(**change), here()))
    assert linear.refuses(spec(), here()) is None


@pytest.mark.parametrize(
    ("arch", "change", "refused"),
    [
        ("gfx1100", {}, True),
        ("gfx1151", {}, True),
        ("gfx1201", {}, False),
        ("gfx1100", {"rows": 1}, False),
        ("gfx1100", {"k": 80}, False),
        ("gfx1100", {"activation": None}, False),
    ],
    ids=str,
)
def test_gated_gemms_with_several_rows_on_rdna_3_are_refused_unless_k_is_a_multiple_of_16(arch, change, refused):
    terms = {"norm_dtype": None, "one_plus": False, "activation": "silu", "residual": False}
    fused = FusedLinearSpec(**spec(rows=2, k=72)._asdict(), **terms)._replace(**change)
    reason = linear.fused_refuses(fused, Device("cpu", rocm=True, arch=arch))
    assert ("a wait is missing" in str(reason)) is refused


def test_gradients_are_refused_when_the_tier_is_named():
    x, weight = random(1, 64, dtype=torch.bfloat16).requires_grad_(), random(32, 64, dtype=torch.bfloat16)
    with options.override(tier="linear=triton"), pytest.raises(TierUnavailable, match="gradient"):
        ops.linear(x, weight)


def test_an_unknown_activation_is_an_error():
    arguments, _ = call(1, torch.bfloat16)
    with pytest.raises(OptionError, match="mish"):
        ops.fused_linear(*arguments, activation="mish")


def spec(**change: Any) -> LinearSpec:
    bf16 = torch.bfloat16
    spec = LinearSpec(
        dtype=bf16,
        weight_dtype=bf16,
        device=torch.device("cpu"),
        n=32,
        k=64,
        bias_dtype=None,
        contiguous=True,
        grad=False,
        rows=1,
    )
    return spec._replace(**change)


def call(
    m: int,
    dtype: torch.dtype,
    *,
    norm: bool | None = None,
    activation: str | None = None,
    residual: bool = False,
    bias: bool = False,
    whole: bool = False,
    n: int = 38,
    k: int = 67,
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return arguments of fused_linear.

    norm: whether the norm uses 1 + w; None for no norm. whole: whether sums are exact.
    """
    if m > 1 and activation is not None and (suite.arch() or "").startswith("gfx11"):
        # Other values of K are refused.
        k -= k % 16
    x, weight = random(1, m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1) * k**-0.5
    if whole:
        weight = (weight * 16).round() / 16
        if norm is None:
            x = x.round()
    arguments = (x, weight, random(n, dtype=dtype, seed=2)) if bias else (x, weight)
    keywords: dict[str, Any] = {"activation": activation}
    if norm is not None:
        keywords["norm"] = ops.Norm(random(k, dtype=dtype, seed=3), 1e-5, norm)
    if residual:
        keywords["residual"] = random(1, m, n if activation is None else n // 2, dtype=dtype, seed=4)
    return arguments, keywords


def check_independence(arguments, keywords):
    """Check that rows and columns of a fused GEMM are independent."""
    (x, weight, *bias), gated = arguments, keywords["activation"] is not None

    def run(x, weight):
        return routed("fused_linear", x[None], weight, *bias, **keywords)[0]

    assert_independent(run, x[0], weight, gated=gated)


def flattened(x, weight, bias=None, *, norm=None, activation=None, residual=None):
    """Return the arguments in the form that implementations take, with keyword tensors in x's dtype."""
    weight_of_norm, eps, one_plus = (None, 0.0, False) if norm is None else norm
    if weight_of_norm is not None and x.dtype == torch.float64:
        weight_of_norm = weight_of_norm.double()
    residual = residual.double() if residual is not None and x.dtype == torch.float64 else residual
    return x, weight, bias, weight_of_norm, residual, eps, one_plus, activation
