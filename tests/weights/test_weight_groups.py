"""The contract of a group of weights, for every registered kind.

A kind whose groups consist of plain linear layers is tested as soon as its file exists. Other kinds have an entry in
`EXAMPLES`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hf_rocm import ops
from hf_rocm.layers.grouped_linear import live, product, project, shuffled_experts
from hf_rocm.layers.weight_group import SLOT, WeightGroup, kind_in
from hf_rocm.ops.eight_bit import INT8
from hf_rocm.weights import experts_shuffled
from hf_rocm.weights.eight_bit import EightBitWeight
from hf_rocm.weights.experts import Stacked
from hf_rocm.weights.experts_shuffled import CopiedExperts
from hf_rocm.weights.fuse import Fused
from hf_rocm.weights.kinds import kinds
from hf_rocm.weights.quantize import _quantize
from hf_rocm.weights.quantize_plan import Group as PlannedGroup
from hf_rocm.weights.quantized import Quantized
from hf_rocm.weights.sharded import Shards
from hf_rocm.weights.shuffled_copy import ShuffledCopy
from hf_rocm.weights.shuffled_parameter import ShuffledGroup, ShuffledLinear
from tests.tolerance import assert_as_good_as_eager
from tests.weights.models import Group
from tests.weights.test_experts import NAMES, MoE

WIDTH = 64
LAYER_NAMES = ("a", "b")
X = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(5)).bfloat16()


class Example(NamedTuple):
    """How to build and run a group of one kind.

    build: returns a stock module. form: turns it into a group. exact: whether nothing is rounded except the GEMM's
    result. copies: whether a copy of the module also has a group, from its first call on.
    """

    build: Callable[[], Any]
    form: Callable[[Any], object]
    run: Callable[[Any], Tensor | None] = lambda module: product(module, X)
    one_by_one: Callable[[Any, Tensor], Tensor] = lambda module, x: torch.cat([module.a(x), module.b(x)], -1)
    move: Callable[[Any], object] = lambda module: setattr(module.b.weight, "data", torch.ones(16, WIDTH).bfloat16())
    nbytes: Callable[[Any], int] = lambda stock: sum(parameter.nbytes for parameter in stock.parameters())
    extra: Callable[[Any], int] = lambda stock: 0
    exact: bool = True
    copies: bool = True


def linears() -> Group:
    torch.manual_seed(3)
    return Group(32, 16, width=WIDTH, bias=True, dtype=torch.bfloat16)


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(WIDTH, 32, bias=True, dtype=torch.bfloat16)


class Parameters(nn.Module):
    """The stacked experts of transformers 5, gate_up and down."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gate_up_proj = nn.Parameter(torch.randn(4, 128, WIDTH).bfloat16())
        self.down_proj = nn.Parameter(torch.randn(4, WIDTH, 64).bfloat16())
        self.top_k = 2


def _fused_first(kind: type[WeightGroup]) -> Callable[[Any], object]:
    return lambda module: Fused.form(module, LAYER_NAMES) or kind.form(module, LAYER_NAMES)


def _stacked(module: Any) -> Tensor | None:
    group: Any = live(module)
    return None if group is None else torch.cat([group.gate_up.flatten(), group.down.flatten()])


def _listed(module: Any, x: Tensor) -> Tensor:
    pairs = [expert._modules[name].weight for expert in module.experts for name in NAMES[:2]]
    return torch.cat([weight.flatten() for weight in (*pairs, *(expert.w2.weight for expert in module.experts))])


def _copied(module: Any) -> Tensor | None:
    pair = shuffled_experts(module, X)
    return (
        None
        if pair is None
        else torch.cat([ops.Shuffled(tensor.data.flatten(0, 1)).plain().flatten() for tensor in pair])
    )


def _swapped(module: Any) -> None:
    module.a.quantized = copy.deepcopy(module.b.quantized)


SINGLE_LAYER: dict[str, Any] = {
    "build": linear,
    "one_by_one": lambda module, x: nn.functional.linear(x, module.weight, module.bias),
    "move": lambda module: setattr(module.weight, "data", torch.ones(32, WIDTH).bfloat16()),
    "copies": False,
}
EXAMPLES: dict[type[WeightGroup], Example] = {
    Shards: Example(linears, lambda module: Shards.join(module, LAYER_NAMES), copies=False),
    ShuffledGroup: Example(linears, _fused_first(ShuffledGroup)),
    ShuffledLinear: Example(form=lambda module: ShuffledLinear.form(module, ()), **SINGLE_LAYER),
    ShuffledCopy: Example(
        form=lambda module: ShuffledCopy.form(module, (), 1), extra=lambda stock: stock.weight.nbytes, **SINGLE_LAYER
    ),
    Quantized: Example(
        linears,
        lambda module: _quantize(PlannedGroup(module, "", LAYER_NAMES), EightBitWeight, INT8, True, warns=False)
        and None,
        move=_swapped,
        nbytes=lambda stock: 48 * WIDTH + 48 * 4 + 48 * 2,
        exact=False,
    ),
    Stacked: Example(
        MoE,
        lambda module: Stacked.form(module, NAMES),
        run=_stacked,
        one_by_one=_listed,
        move=lambda module: setattr(module.experts[1].w1.weight, "data", torch.ones(24, 16)),
    ),
    CopiedExperts: Example(
        Parameters,
        lambda module: CopiedExperts.form(module, ()),
        run=_copied,
        one_by_one=lambda module, x: torch.cat([module.gate_up_proj.flatten(), module.down_proj.flatten()]),
        move=lambda module: setattr(module.down_proj, "data", torch.ones(4, WIDTH, 64).bfloat16()),
        extra=lambda stock: sum(parameter.nbytes for parameter in stock.parameters()),
        copies=False,
    ),
}


@pytest.fixture(params=kinds(), ids=lambda kind: kind.__name__)
def kind(request, machine, monkeypatch):
    machine(threshold=1)
    # The recorded aiter lacks the kernel.
    monkeypatch.setattr(experts_shuffled, "aiter_refuses", lambda *_: None)
    with torch.no_grad():
        yield request.param


def example_of(kind: type[WeightGroup]) -> Example:
    return EXAMPLES.get(kind) or Example(linears, lambda module: kind.form(module, LAYER_NAMES))


def formed(kind: type[WeightGroup]) -> tuple[Example, Any]:
    example = example_of(kind)
    module = example.build()
    assert example.form(module) is None
    assert kind_in(module) is kind
    return example, module


def assert_matches_layers(example: Example, module: Any, stock: Any) -> None:
    """Check that the group's results equal those of its separate layers, which are stock or have 8-bit weights."""
    actual = example.run(module)
    assert actual is not None
    if not example.exact:
        torch.testing.assert_close(actual, example.one_by_one(module, X))
        return
    eager = example.one_by_one(stock, X)
    assert_as_good_as_eager(actual, eager, example.one_by_one(copy.deepcopy(stock).double(), X.double()))


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return the attribute names and the classes of the modules, and the identities of the parameters."""
    entries: dict[str, Any] = {}
    for path, named_module in module.named_modules():
        entries[f"{path} attributes"] = sorted(named_module.__dict__)
        entries[f"{path} class"] = type(named_module)
        entries |= {f"{path} {name}": id(parameter) for name, parameter in named_module._parameters.items()}
    return entries


def test_a_live_group_computes_what_its_layers_compute(kind):
    example, module = formed(kind)
    assert_matches_layers(example, module, example.build())
    if kind not in (Stacked, CopiedExperts):
        parts = project(module, X)
        assert parts is not None and torch.equal(torch.cat(parts, -1), product(module, X))


def test_norm_and_activation_are_fused_with_the_gemm(kind):
    _, module = formed(kind)
    if kind in (Stacked, CopiedExperts):
        # Experts are not a GEMM with one input.
        assert product(module, X) is None
        return
    norm = ops.Norm(torch.randn(WIDTH).bfloat16(), 1e-6)
    normed = ops.rms_norm(X, norm.weight, eps=norm.eps)
    expected = ops.act_and_mul(product(module, normed), activation="silu")
    torch.testing.assert_close(product(module, X, norm=norm, activation="silu"), expected)


def test_a_stale_group_is_not_used_after_a_weight_was_replaced(kind):
    example, module = formed(kind)
    assert example.run(module) is not None
    example.move(module)
    actual = example.run(module)
    # The group was rebuilt from the current weights.
    if actual is not None:
        torch.testing.assert_close(actual, example.one_by_one(module, X))
    stale = live(module)
    assert stale is None or not stale.parts or type(stale) is not kind


def test_restore_brings_back_parameters_values_and_attributes(kind):
    example = example_of(kind)
    module, stock = example.build(), example.build()
    before = state_of(module)
    assert example.form(module) is None and SLOT in module.__dict__
    kind.restore(module)
    assert state_of(module) == before
    for one, other in zip(module.parameters(), stock.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.untyped_storage().nbytes() == one.nbytes
    assert live(module) is None


def test_the_bytes_reported_are_those_of_the_tensors(kind):
    example, module = formed(kind)
    stock, group = example.build(), module.__dict__[SLOT]
    assert group.nbytes(module) == example.nbytes(stock)
    assert group.extra_bytes(module) == example.extra(stock)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "pickle"]
)
def test_a_copy_has_a_separate_group_or_none(kind, duplicate):
    example, module = formed(kind)
    twin = duplicate(module)
    if not example.copies:
        assert example.run(twin) is None
        assert torch.equal(example.one_by_one(twin, X), example.one_by_one(example.build(), X))
        return
    assert_matches_layers(example, twin, example.build())
    for parameter in twin.parameters():
        parameter.zero_()
    assert_matches_layers(example, module, example.build())


def test_with_gradients_the_layers_run(kind):
    example, module = formed(kind)
    # The weights of quantised layers are not parameters.
    if kind is Quantized:
        return
    with torch.enable_grad():
        actual = example.run(module)
        assert actual is None or actual.grad_fn is not None
    # afterwards, the parameter of a single shuffled layer is the stock one
    assert kind is ShuffledLinear or example.run(module) is not None
