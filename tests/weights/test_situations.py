"""Changes to a model after loading take effect in a prepared model as in a stock one.

Most tests state how many of the four groups still run fused. `assert_matches_stock` checks this by counting the GEMMs
that ran.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys

import accelerate
import peft
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hf_rocm
from hf_rocm.weights.fuse import why_not
from hf_rocm.weights.shuffled_copy import unwatch
from tests.weights import models
from tests.weights.models import GROUPS, IDS, assert_matches_stock, blocks, live, logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("conversion", ["to", "method"])
def test_a_conversion_to_another_dtype_keeps_the_groups(model, dtype, conversion):
    if conversion == "to":
        model.to(dtype)
    else:
        {torch.bfloat16: model.bfloat16, torch.float16: model.half, torch.float64: model.double}[dtype]()
    assert blocks(model) == GROUPS and model.model.layers[0].mlp.up_proj.weight.dtype == dtype
    # In float64, the reference itself has rounding errors.
    if dtype != torch.float64:
        assert_matches_stock(model, GROUPS)
    model.float()
    assert_matches_stock(model, GROUPS)


def test_a_move_to_the_same_device_keeps_the_groups(model):
    model.to("cpu").train().eval()
    assert_matches_stock(model, GROUPS)


def _other_weights(model):
    return {name: torch.randn_like(tensor) * 0.1 for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("assign", "groups"), [(False, GROUPS), (True, 0)])
def test_load_state_dict_takes_effect(model, assign, groups):
    before = logits(model)
    model.load_state_dict(_other_weights(model), assign=assign)
    assert_matches_stock(model, groups)
    assert not torch.allclose(logits(model), before)
    hf_rocm.prepare(model, force=True)
    assert_matches_stock(model, GROUPS)


def test_in_place_writes_take_effect_and_keep_the_groups(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert_matches_stock(model, GROUPS)


def _data(linear):
    linear.weight.data = torch.randn_like(linear.weight)


def _parameter(linear):
    linear.weight = nn.Parameter(torch.randn_like(linear.weight))


def _accelerate(linear):
    accelerate.utils.set_module_tensor_to_device(linear, "weight", "cpu", value=torch.randn_like(linear.weight))


@pytest.mark.parametrize("replace", [_data, _parameter, _accelerate])
def test_a_replaced_weight_unfuses_its_group(model, replace):
    layer = model.model.layers[0]
    replace(layer.self_attn.k_proj)
    assert_matches_stock(model, GROUPS - 1)
    replace(layer.mlp.gate_proj)
    assert_matches_stock(model, GROUPS - 2)
    assert "replaced" in why_not(layer.mlp, ("gate_proj", "up_proj"))


def test_a_replaced_module_unfuses_its_group(model):
    model.model.layers[1].mlp.gate_proj = nn.Linear(64, 80, bias=False)
    assert_matches_stock(model, GROUPS - 1)


def test_pruning_layers_in_place_takes_effect(model):
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.gate_proj.weight.data = mlp.gate_proj.weight.data[:40]
        mlp.up_proj.weight.data = mlp.up_proj.weight.data[:40]
        mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :40]
    x = torch.randn(2, 64)
    expected = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected)
    assert live(model) == GROUPS - 1


def test_resized_embeddings_keep_the_groups(model):
    model.resize_token_embeddings(104)
    assert_matches_stock(model, GROUPS)


def test_weights_that_are_tied_later_unfuse_their_group(model):
    first, second = model.model.layers
    first.mlp.up_proj.weight = second.mlp.up_proj.weight
    assert_matches_stock(model, GROUPS - 1)
    with torch.no_grad():
        second.mlp.up_proj.weight.mul_(2)
    assert_matches_stock(model, GROUPS - 1)
    # The first module with the shared parameter moves it out of the second one's block.
    model.double().float()
    assert first.mlp.up_proj.weight is second.mlp.up_proj.weight
    assert_matches_stock(model, GROUPS - 2)


def test_a_user_hook_is_called(model):
    seen = []
    handle = model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *call: seen.append(call))
    assert_matches_stock(model, GROUPS - 1, twin=models.build())
    assert seen
    handle.remove()
    assert_matches_stock(model, GROUPS)


@pytest.mark.parametrize("duplicate", ["deepcopy", "pickle", "torch.save"])
def test_copies_have_separate_weights(model, duplicate):
    if duplicate == "deepcopy":
        twin = copy.deepcopy(model)
    elif duplicate == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        size = sum(parameter.nbytes for parameter in model.parameters())
        assert buffer.tell() < size * 1.2
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.weight.mul_(2)
        model.model.layers[1].self_attn.q_proj.weight.mul_(3)
    # An unpickled model is fused at its first call.
    assert blocks(twin) == (GROUPS if duplicate == "deepcopy" else 0)
    assert_matches_stock(twin, GROUPS)
    assert_matches_stock(model, GROUPS)
    assert not torch.equal(twin.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    twin.bfloat16()
    assert_matches_stock(twin, GROUPS)


def test_a_pickle_can_be_loaded_without_hf_rocm(model, tmp_path):
    torch.save(model, tmp_path / "model.pt")
    torch.save(logits(models.build()), tmp_path / "expected.pt")
    script = (
        "import sys; sys.modules['hf_rocm'] = None\n"
        "import torch\n"
        "model = torch.load('model.pt', weights_only=False)\n"
        f"ids = torch.tensor({IDS.tolist()})\n"
        "with torch.no_grad(): actual = model(ids, use_cache=False).logits\n"
        "assert torch.equal(actual, torch.load('expected.pt'))\n"
        "model.half().float(); torch.save(model, 'again.pt')\n"
        "print(model.model.layers[0].mlp.__dict__['_hf_rocm_group'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "('fuse.Fused', 'pending', 'gate_proj', 'up_proj')"
    assert_matches_stock(torch.load(tmp_path / "again.pt", weights_only=False), GROUPS)


def test_memory_shared_with_other_processes_stays_shared(model):
    model.share_memory()
    assert all(parameter.is_shared() for parameter in model.parameters())
    assert_matches_stock(model, 0)
    assert all(parameter.is_shared() for parameter in model.parameters())
    assert "shared with other processes" in why_not(model.model.layers[0].mlp, ("gate_proj", "up_proj"))


def test_a_move_to_meta_and_back_fuses_again(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    model.to("meta")
    assert blocks(model) == 0
    model.to_empty(device="cpu")
    for name, tensor in buffers.items():
        model.get_buffer(name).copy_(tensor)
    model.load_state_dict(state)
    assert_matches_stock(model, GROUPS)


@pytest.mark.parametrize("fused_optimizer", [False, True])
def test_two_training_steps_equal_those_of_an_unfused_model(model, fused_optimizer):
    # use a copy, because the last bit of a GEMM may depend on the address of a mapped weight, and AdamW's first step
    # depends on a gradient's sign
    model, twin = copy.deepcopy(model), models.unfused()
    for variant in (model, twin):
        optimizer = torch.optim.AdamW(variant.parameters(), lr=0.01, fused=fused_optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            variant(IDS, labels=IDS, use_cache=False).loss.backward()
            optimizer.step()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert "gradients are enabled" in why_not(model.model.layers[0].mlp, ("gate_proj", "up_proj"))
    assert_matches_stock(model, GROUPS)


def test_gradients_equal_stock(model, stock):
    for variant in (model, stock):
        variant(IDS, labels=IDS, use_cache=False).loss.backward()
    for (name, one), other in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
        assert one.grad.abs().max() > 0


# peft still reads an attribute that transformers 5 renamed
ignores_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def lora(model):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "gate_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@ignores_peft
def test_lora_can_be_added_merged_unmerged_and_unloaded(model):
    stock = models.build()
    torch.manual_seed(3)
    adapted = lora(model)
    torch.manual_seed(3)
    twin = lora(stock)

    def equal(groups):
        torch.testing.assert_close(logits(adapted), logits(twin))
        assert live(adapted) == groups

    assert not torch.allclose(logits(twin), logits(models.build()), atol=1e-2)
    equal(0)
    for variant in (adapted, twin):
        variant.merge_adapter()
    equal(0)
    for variant in (adapted, twin):
        variant.unmerge_adapter()
    equal(0)
    assert adapted.unload() is model
    assert_matches_stock(model, GROUPS)
    torch.testing.assert_close(logits(model), logits(models.build()))


@ignores_peft
@pytest.mark.parametrize("safe", [False, True])
def test_lora_merge_and_unload_equals_stock(model, safe):
    stock = models.build()
    torch.manual_seed(3)
    merged = lora(model).merge_and_unload(safe_merge=safe)
    torch.manual_seed(3)
    expected = lora(stock).merge_and_unload(safe_merge=safe)
    torch.testing.assert_close(logits(merged), logits(expected))
    assert not torch.allclose(logits(merged), logits(models.build()), atol=1e-2)
    hf_rocm.prepare(merged, force=True)
    assert_matches_stock(merged, GROUPS)


@ignores_peft
def test_lora_training_equals_stock(model):
    stock = models.build()
    for variant in (model, stock):
        torch.manual_seed(3)
        adapted = lora(variant).train()
        optimizer = torch.optim.SGD(adapted.parameters(), lr=0.1)
        adapted(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
    for (name, one), other in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_cpu_offload_runs_without_fused_blocks(model):
    expected = logits(models.build())
    accelerate.cpu_offload(model, execution_device="cpu")
    torch.testing.assert_close(logits(model), expected)
    assert live(model) == 0 and blocks(model) == 0


def test_disk_offload_runs_without_fused_blocks(model, tmp_path):
    expected = logits(models.build())
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    torch.testing.assert_close(logits(model), expected)
    assert live(model) == 0 and blocks(model) == 0


@pytest.mark.parametrize("before", [False, True])
def test_a_model_with_a_device_map_of_two_entries_is_still_fused(stock, before):
    """With one entry, accelerate adds no hooks. With two, it adds one to every layer, although nothing is moved."""
    if before:
        hf_rocm.prepare(stock, force=True)
    accelerate.dispatch_model(stock, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    assert "forward" in stock.model.layers[0].mlp.gate_proj.__dict__
    if not before:
        hf_rocm.prepare(stock, force=True)
    assert_matches_stock(stock, GROUPS)
    assert logits(hf_rocm.restore(stock)).shape == (2, 7, 96)


def test_a_device_map_with_an_offloaded_layer_fuses_the_others(stock, tmp_path):
    expected = logits(stock)
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu"}
    device_map |= {"lm_head": "cpu", "model.layers.1": "disk"}
    accelerate.dispatch_model(stock, device_map, main_device="cpu", offload_dir=tmp_path)
    hf_rocm.prepare(stock, force=True)
    skipped = stock.__dict__["_hf_rocm_report"]["skipped"]
    assert set(skipped) == {"model.layers.1.self_attn", "model.layers.1.mlp"}
    assert all("may move its weights" in reason for reason in skipped.values())
    torch.testing.assert_close(logits(stock), expected)
    assert live(stock) == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_follows_every_change(model, backend):
    gc.collect()
    # otherwise, freeing the last shuffled copy of earlier tests removes a hook on which the compiler guards
    unwatch()
    torch._dynamo.reset()
    # pass a 4D mask, because the code of transformers 4.x that builds a mask can't be traced into one graph
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    call = {"attention_mask": mask, "use_cache": False}
    counter = CompileCounterWithBackend(backend)
    run = torch.compile(lambda ids: model(ids, **call).logits, backend=counter, fullgraph=True)
    for change in (None, lambda linear: linear.weight.mul_(2), _data, _parameter):
        with torch.no_grad():
            if change:
                change(model.model.layers[0].mlp.up_proj)
            torch.testing.assert_close(run(IDS), logits(models.stock_with_weights_of(model)))
    assert counter.frame_count == 1
    targets = [str(node.target) for node in counter.graphs[0].graph.nodes]
    assert targets.count("hf_rocm.linear_group") == GROUPS
    torch._dynamo.reset()


def test_an_exported_model_does_not_need_hf_rocm(model):
    """The program contains the parameters and no operation of hf_rocm. The model stays fused."""

    class Logits(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids, mask):
            return self.inner(ids, attention_mask=mask, use_cache=False).logits

    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    wrapped = Logits(model)
    with torch.no_grad():
        program = torch.export.export(wrapped, (IDS, mask), strict=False)
        assert "hf_rocm" not in str(program.graph)
        assert set(program.state_dict) >= set(dict(wrapped.named_parameters()))
        torch.testing.assert_close(program.module()(IDS, mask), logits(models.build()))
    del program
    assert_matches_stock(model, GROUPS)


def _hooked(checkpoint, folder):
    return {"device_map": {"model": "cpu", "lm_head": "cpu"}}, GROUPS


def _one_device(checkpoint, folder):
    return {"device_map": {"": "cpu"}}, GROUPS


def _offloaded(checkpoint, folder):
    parts = ("model.embed_tokens", "model.layers.0", "model.rotary_emb", "model.norm", "lm_head")
    device_map = {part: "cpu" for part in parts} | {"model.layers.1": "disk"}
    return {"device_map": device_map, "offload_folder": folder}, 2


@pytest.mark.parametrize("placement", [_one_device, _hooked, _offloaded])
def test_a_model_loaded_with_a_device_map_equals_stock(checkpoint, stock, tmp_path, placement):
    arguments, groups = placement(checkpoint, tmp_path / "offloaded")
    loaded = hf_rocm.from_pretrained(checkpoint, force=True, **arguments).eval()
    torch.testing.assert_close(logits(loaded), logits(stock))
    assert live(loaded) == groups
    assert_matches_stock(loaded, groups, twin=stock)
