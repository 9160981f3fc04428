"""A model with shuffled weights uses its current weights after every detectable change, or after `prepare`."""

from __future__ import annotations

import copy
import io
import pickle

import peft
import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm.ops.shuffled import shuffle
from hf_rocm.weights import shuffled_copy
from tests.aiter import recorded
from tests.tolerance import assert_as_good_as_eager
from tests.weights.models import IDS, LAYERS, logits
from tests.weights.shuffling import GEMMS, ROWS, account, assert_shuffled_gemms, build, prepared, traces


def test_load_state_dict_takes_effect_in_the_next_forward(shuffled_model):
    other = {name: torch.randn_like(p) * 0.1 for name, p in build().state_dict().items()}
    assert shuffled_model.load_state_dict(other).missing_keys == []
    in_place = account(shuffled_model)["threshold"] == 0
    assert_shuffled_gemms(shuffled_model, shuffled=0 if in_place else GEMMS, plain=2 * LAYERS if in_place else 0)
    assert all(torch.equal(p, other[name]) for name, p in shuffled_model.state_dict().items())


@pytest.mark.parametrize("write", ["parameter", "detached", "data", "replaced data", "new parameter", "assigned"])
@pytest.mark.parametrize("path", ["model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"])
def test_every_write_takes_effect(shuffled_model, write, path):
    linear = shuffled_model.get_submodule(path)
    new = torch.randn(linear.weight.shape, dtype=torch.bfloat16) * 0.1
    with torch.no_grad():
        if write == "parameter":
            linear.weight.copy_(new)
        elif write == "detached":
            linear.weight.detach().copy_(new)
        elif write == "data":
            linear.weight.data.copy_(new)
        elif write == "replaced data":
            linear.weight.data = new.clone()
        elif write == "new parameter":
            linear.weight = nn.Parameter(new.clone())
        else:
            linear.load_state_dict({"weight": new.clone()}, assign=True)
    if write == "data" and account(shuffled_model)["threshold"]:
        # a write through .data does not change the version, so preparing again compares the values and updates the copy
        hf_rocm.prepare(shuffled_model, force=True, preshuffle="all", budget=1.0)
    assert torch.equal(shuffled_model.state_dict()[f"{path}.weight"], new)
    eager = build()
    eager.load_state_dict(shuffled_model.state_dict())
    wide = copy.deepcopy(eager).double()
    assert_as_good_as_eager(logits(shuffled_model), logits(eager), logits(wide))


def test_state_dict_pickle_deepcopy_and_checkpoints_have_the_stock_layout(shuffled_model, tmp_path):
    expected = build().state_dict()

    def check_state(state):
        assert all(type(tensor) is torch.Tensor and torch.equal(tensor, expected[k]) for k, tensor in state.items())
        assert list(state) == list(expected)

    for twin in (copy.deepcopy(shuffled_model), pickle.loads(pickle.dumps(shuffled_model))):
        assert all(type(p) is nn.Parameter and torch.equal(p, expected[n]) for n, p in twin.named_parameters())
        assert_shuffled_gemms(twin, shuffled=0, plain=2 * LAYERS)
        assert not traces(hf_rocm.restore(twin))
    buffer = io.BytesIO()
    torch.save(shuffled_model, buffer)
    # Copying and pickling did not change the model.
    assert_shuffled_gemms(shuffled_model, shuffled=GEMMS)
    check_state(shuffled_model.state_dict())
    shuffled_model.save_pretrained(tmp_path)
    check_state(type(shuffled_model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16).state_dict())
    hf_rocm.prepare(shuffled_model, force=True, preshuffle="all", budget=1.0)
    assert_shuffled_gemms(shuffled_model, shuffled=GEMMS)


def test_moves_and_casts_discard_the_old_copy(shuffled_model):
    with torch.no_grad():
        wide = copy.deepcopy(shuffled_model).float()
        twin = build().float()
        torch.testing.assert_close(shuffled_model.float()(IDS).logits, twin(IDS).logits)
        torch.testing.assert_close(wide(IDS).logits, twin(IDS).logits)
    assert all(parameter.dtype == torch.float32 for parameter in shuffled_model.parameters())


def test_no_parameter_remains_an_inference_tensor(machine):
    """Prepare and run the model under inference mode, but write to its weights and restore it outside this mode."""
    for threshold in (0, ROWS):
        machine(threshold=threshold)
        model = build()
        with torch.inference_mode():
            hf_rocm.prepare(model, force=True, preshuffle="all", budget=1.0)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
            model.model.layers[0].mlp.down_proj.weight.mul_(2)
        eager = build()
        eager.load_state_dict(copy.deepcopy(model).state_dict())
        with torch.inference_mode():
            actual = model(IDS, use_cache=False).logits
            state = model.state_dict()
        assert_as_good_as_eager(actual.clone(), logits(eager), logits(copy.deepcopy(eager).double()))
        assert all(torch.equal(tensor, state[name]) for name, tensor in eager.state_dict().items())
        hf_rocm.restore(model)
        assert not any(parameter.is_inference() for parameter in model.parameters())
        model(IDS, labels=IDS).loss.backward()


def test_gradients_reach_the_stock_parameters(shuffled_model):
    twin = build()
    for model in (shuffled_model, twin):
        model(IDS, labels=IDS, use_cache=False).loss.backward()
    for (name, actual), (_, reference) in zip(shuffled_model.named_parameters(), twin.named_parameters(), strict=True):
        assert actual.grad is not None, name
        torch.testing.assert_close(actual.grad, reference.grad, rtol=0.1, atol=0.02)


def test_an_optimizer_made_earlier_updates_the_weights(shuffled_model):
    optimizer = torch.optim.SGD(shuffled_model.parameters(), lr=0.5)
    before = logits(shuffled_model)
    shuffled_model(IDS, labels=IDS, use_cache=False).loss.backward()
    optimizer.step()
    assert not torch.allclose(logits(shuffled_model), before, atol=1e-3)
    eager = build()
    eager.load_state_dict(shuffled_model.state_dict())
    assert_as_good_as_eager(logits(shuffled_model), logits(eager), logits(copy.deepcopy(eager).double()))


def test_an_adapter_merged_in_place_takes_effect(shuffled_model):
    """Like PEFT, wrap the layer, write to its weight through `.data`, and unwrap it again."""

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base
            self.delta = nn.Parameter(torch.randn_like(base.weight.data) * 0.05, requires_grad=False)

        def forward(self, x):
            return self.base_layer(x) + nn.functional.linear(x, self.delta)

    for path in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        parent, name = shuffled_model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        base = getattr(parent, name)
        adapter = Adapter(base)
        setattr(parent, name, adapter)
        base.weight.data += adapter.delta
        setattr(parent, name, base)
    eager = build()
    state = shuffled_model.state_dict()
    assert not torch.equal(state["model.layers.1.mlp.down_proj.weight"], eager.model.layers[1].mlp.down_proj.weight)
    eager.load_state_dict(state)
    assert_as_good_as_eager(logits(shuffled_model), logits(eager), logits(copy.deepcopy(eager).double()))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("safe", [False, True])
def test_lora_of_peft_equals_stock(shuffled_model, safe):
    """Add, run, merge, unmerge, merge again and unload an adapter. Results stay close to those of a stock model."""
    stock = build()

    def lora(model):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config).eval()

    actual, reference = lora(shuffled_model), lora(stock)

    def equal():
        torch.testing.assert_close(logits(actual), logits(reference), rtol=0.05, atol=0.3)
        state = reference.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in copy.deepcopy(actual).state_dict().items())

    equal()
    for variant in (actual, reference):
        variant.merge_adapter(safe_merge=safe)
    equal()
    assert not torch.allclose(logits(actual), logits(build()), atol=1.0)
    for variant in (actual, reference):
        variant.unmerge_adapter()
    equal()
    actual, reference = (variant.merge_and_unload(safe_merge=safe) for variant in (actual, reference))
    equal()
    # Merge an adapter without calling the model first.
    merged = lora(prepared()).merge_and_unload(safe_merge=safe)
    torch.testing.assert_close(
        logits(merged), logits(lora(build()).merge_and_unload(safe_merge=safe)), rtol=0.05, atol=0.3
    )


# The mask code of transformers 4.x emits this warning when it is traced.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_models_read_shuffled_weights_and_follow_writes(shuffled_model):
    eager = build()
    torch._dynamo.reset()
    compiled = torch.compile(shuffled_model, backend="aot_eager")
    with torch.no_grad():
        compiled(IDS, use_cache=False)
        del recorded.kernels.CALLS[:]
        actual = compiled(IDS, use_cache=False).logits
    expected = logits(copy.deepcopy(eager).double())
    assert_as_good_as_eager(actual, logits(eager), expected)
    marked = [
        getattr(call.arguments["B"], "is_shuffled", False) for call in recorded.kernels.CALLS if "gemm" in call[0]
    ]
    # Without original weights, a group runs layer by layer.
    single = 7 * LAYERS + 1
    assert sum(marked) == (single if account(shuffled_model)["threshold"] == 0 else GEMMS)
    new = {name: torch.randn_like(p) * 0.1 for name, p in eager.state_dict().items()}
    shuffled_model.load_state_dict(new)
    eager.load_state_dict(new)
    with torch.no_grad():
        actual = compiled(IDS, use_cache=False).logits
    assert_as_good_as_eager(actual, logits(eager), logits(copy.deepcopy(eager).double()))
    torch._dynamo.reset()


def test_hooks_and_functional_calls_get_stock_weights(shuffled_model):
    linear = shuffled_model.model.layers[0].mlp.down_proj
    seen = []
    handle = linear.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    assert_shuffled_gemms(shuffled_model, shuffled=GEMMS)
    handle.remove()
    assert seen
    other = torch.randn(96, 64).bfloat16().t().contiguous()
    x = torch.randn(ROWS, 96).bfloat16()
    with torch.no_grad():
        called = torch.func.functional_call(linear, {"weight": other}, (x,))
    torch.testing.assert_close(called, nn.functional.linear(x, other))


def test_a_copy_is_renewed_in_place(machine):
    machine()
    linear = nn.Linear(64, 32, bias=False).bfloat16()
    kept = shuffled_copy.ShuffledCopy(linear.weight, [linear.weight], ROWS)
    x = torch.randn(ROWS, 64).bfloat16()
    address = kept.shuffled.data.data_ptr()
    with torch.no_grad():
        linear.weight.mul_(2)
        assert torch.equal(kept.serves(x, [linear.weight]).data, shuffle(linear.weight).data)
        assert kept.shuffled.data.data_ptr() == address
        linear.weight.data = linear.weight.data.clone()
        assert kept.serves(x, [linear.weight]) is None and kept.extra_bytes(linear) == 0
    shuffled_copy.unwatch()
