"""If one model is forced, the rest of the process stays stock, and `restore` restores the original state."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm import ops
from hf_rocm.overlay import bind
from tests.parity import models
from tests.parity.models import MODELS, assert_fused_gemms_ran, assert_served, tokens
from tests.releases import in_the_newest

every_model = pytest.mark.parametrize("name", MODELS)


def routes_of(model, **arguments):
    with ops.recording() as routes:
        result = model(input_ids=tokens(2, 9), **arguments)
    return routes, result


def assert_stock(model, folder, name):
    """Check that classes, state dict and outputs equal those of a stock model, and that no hf_rocm kernel ran."""
    fresh = models.load_stock(name, folder)
    assert [type(module) for module in model.modules()] == [type(module) for module in fresh.modules()]
    assert list(model.state_dict()) == list(fresh.state_dict())
    for actual, expected in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True):
        assert torch.equal(actual, expected)
    assert not [key for module in model.modules() for key in vars(module) if key.startswith("_hf_rocm")]
    routes, result = routes_of(model)
    assert routes == []
    # compare copies, because the last bit of a GEMM may depend on the address of a mapped weight
    logits = [copy.deepcopy(variant)(input_ids=tokens(2, 9)).logits for variant in (model, fresh)]
    assert torch.equal(*logits)
    torch.testing.assert_close(result.logits, logits[0])


@every_model
def test_a_stock_model_beside_a_forced_one_stays_stock(name, checkpoint):
    folder = checkpoint(name, torch.float32)
    before = models.load_stock(name, folder)
    expected = before(input_ids=tokens(2, 9)).logits
    forced = models.load_prepared(folder)
    after = models.load_stock(name, folder)
    for stock in (before, after):
        routes, result = routes_of(stock)
        assert routes == [] and torch.equal(result.logits, expected)
    routes, _ = routes_of(forced)
    assert_served(name, forced, routes, calls=1)


@every_model
def test_prepare_works_on_a_model_of_stock_classes(name, checkpoint):
    model = models.load_stock(name, checkpoint(name, torch.float32))
    expected = model(input_ids=tokens(2, 9)).logits
    assert hf_rocm.prepare(model, force=True) is model
    routes, result = routes_of(model)
    assert_served(name, model, routes, calls=1)
    assert_fused_gemms_ran(model, routes)
    torch.testing.assert_close(result.logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.output_attentions=True. is not supported:UserWarning")
@every_model
def test_restore_after_output_attentions_hooks_and_deepcopy(name, checkpoint):
    folder = checkpoint(name, torch.float32)
    model = models.load_prepared(folder)
    routes_of(model, output_attentions=True, output_hidden_states=True)
    seen = []
    layer = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    handle = layer.register_forward_hook(lambda *arguments: seen.append(1))
    duplicate = copy.deepcopy(model)
    routes, _ = routes_of(model)
    assert seen
    handle.remove()
    assert hf_rocm.restore(model) is model
    assert_stock(model, folder, name)

    # the copy is a separate forced model and is restored separately
    next(module for module in duplicate.modules() if isinstance(module, torch.nn.Linear))._forward_hooks.clear()
    routes, _ = routes_of(duplicate)
    assert_served(name, duplicate, routes, calls=1)
    assert_fused_gemms_ran(duplicate, routes)
    hf_rocm.restore(duplicate)
    assert_stock(duplicate, folder, name)


@every_model
def test_restored_weights_have_separate_memory(name, checkpoint):
    model = models.load_prepared(checkpoint(name, torch.float32))
    hf_rocm.restore(model)
    parameters = list(dict.fromkeys(model.parameters()))
    spans = sorted((parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes) for parameter in parameters)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in parameters)


@every_model
def test_preparing_and_restoring_are_idempotent(name, checkpoint):
    folder = checkpoint(name, torch.float32)
    model = models.load_prepared(folder)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    hf_rocm.prepare(model, force=True)
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    routes, _ = routes_of(model)
    assert_served(name, model, routes, calls=1)
    hf_rocm.restore(hf_rocm.restore(model))
    assert_stock(model, folder, name)
    hf_rocm.prepare(model, force=True)
    routes, _ = routes_of(model)
    assert_fused_gemms_ran(model, routes)


def test_deactivate_restores_the_classes_and_activate_binds_them_again(checkpoint):
    model = models.load_prepared(checkpoint("llama", torch.float32))
    attention = type(model.model.layers[0].self_attn)
    dispatcher = attention.forward
    assert hf_rocm.deactivate("llama") == ["llama"]
    try:
        assert attention.forward is dispatcher.__wrapped__
        assert "_apply" not in vars(attention)
        routes, _ = routes_of(model)
        assert routes == []
    finally:
        hf_rocm.prepare(model, force=True)
    assert attention.forward is dispatcher
    routes, _ = routes_of(model)
    assert_served("llama", model, routes, calls=1)


def test_a_subclass_stays_stock(checkpoint):
    """A layer in remote code that subclasses a stock layer keeps the stock forward."""

    class Remote(transformers.models.llama.modeling_llama.LlamaMLP):
        pass

    model = models.load_prepared(checkpoint("llama", torch.float32))
    mlp = model.model.layers[0].mlp
    mlp.__class__ = Remote
    routes, _ = routes_of(model)
    assert sum(route.operation == "act_and_mul" for route in routes) == 1
    assert bind.mode_of(mlp) == bind.OFF


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", "aot_eager"),
        ("bert", "eager"),
        # every overlay is traced in tests/coverage
        pytest.param("qwen3", "eager", marks=(pytest.mark.slow, in_the_newest)),
        pytest.param("gemma", "aot_eager", marks=(pytest.mark.slow, in_the_newest)),
    ],
)
def test_a_forced_model_compiles_without_a_graph_break(name, backend, checkpoint):
    model = models.load_prepared(checkpoint(name, torch.float32))
    expected = model(input_ids=tokens(2, 9)).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        actual = compiled(input_ids=tokens(2, 9)).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    longer = tokens(2, 13)
    torch.testing.assert_close(compiled(input_ids=longer).logits, model(input_ids=longer).logits, rtol=1e-4, atol=1e-4)
