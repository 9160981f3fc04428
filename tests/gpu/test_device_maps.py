"""Device maps across GPUs and the CPU: tokens equal stock's with the same map, and layers on a GPU are fused."""

from __future__ import annotations

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm import ops, options
from hf_rocm.errors import GraphError
from hf_rocm.weights.fuse import why_not
from tests.distributed.test_accelerate import hooks
from tests.generation.conftest import counted, generate, make, prompt
from tests.weights.models import live

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning"),
]
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not run: needs two GPUs")

KINDS = ["llama", "qwen3", "mistral", "gemma2"]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 503, "num_hidden_layers": 4}
GROUPS = 2 * SIZES["num_hidden_layers"]
MOVED = "run by a hook (AlignDevicesHook) that may move its weights"


@pytest.fixture(autouse=True)
def unprobed():
    # First-use checks take seconds, and other tests cover them.
    with options.override(probe=False):
        yield


@pytest.fixture
def checkpoint(tmp_path):
    def save(kind):
        make(kind, **SIZES).save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return save


def make_device_map(*devices, tied=False):
    """A device map. The embedding and the head are on the devices of the first and the last layer on a GPU.

    devices: the device of every layer. tied: the head shares the embedding's weight and device.
    """
    layers = {f"model.layers.{number}": device for number, device in enumerate(devices)}
    first, *_, last = [device for device in devices if device != "cpu"]
    head = first if tied else last
    return {"model.embed_tokens": first, "model.rotary_emb": first, **layers, "model.norm": last, "lm_head": head}


def load(folder, *, prepared, **arguments):
    if prepared:
        return hf_rocm.from_pretrained(folder, force=True, **arguments).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **arguments).eval()


def make_inputs(**arguments):
    return {name: tensor.cuda(0) for name, tensor in prompt(**arguments).items()}


def count_fused_gemms(model, inputs):
    """The number of fused GEMMs that run for one prompt."""
    layer = model.model.layers[0]
    qkv = sum(getattr(layer.self_attn, name).out_features for name in ("q_proj", "k_proj", "v_proj"))
    shapes = {(qkv, SIZES["hidden_size"]), (2 * SIZES["intermediate_size"], SIZES["hidden_size"])}
    with torch.no_grad(), ops.recording() as routes:
        model(**inputs, use_cache=False)
    return sum(route.operation in ("linear", "fused_linear") and route.shapes[1] in shapes for route in routes)


def same_as_stock(prepared, stock, *, groups):
    assert prepared.hf_device_map == stock.hf_device_map
    assert hooks(prepared) == hooks(stock)
    for padded in (0, 3):
        inputs = make_inputs(padded=padded)
        assert torch.equal(generate(prepared, inputs, new=24), generate(stock, inputs, new=24))
        assert count_fused_gemms(prepared, inputs) == groups == live(prepared)
    assert counted(prepared) == (0, 0)


def cache_devices(model):
    with torch.no_grad():
        cache = model(**make_inputs(), use_cache=True).past_key_values
    return [(layer.keys.device, layer.values.device) for layer in cache.layers]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_offloaded_to_the_cpu_run_as_in_stock(kind, checkpoint, tmp_path):
    arguments = {"device_map": make_device_map(0, "cpu", 0, "cpu")}
    folder = checkpoint(kind)
    prepared, stock = (load(folder, prepared=flag, **arguments) for flag in (True, False))
    same_as_stock(prepared, stock, groups=GROUPS - 4)
    assert cache_devices(prepared) == cache_devices(stock) == [(torch.device("cuda", 0),) * 2] * 4
    with torch.no_grad():
        reasons = [why_not(layer.mlp, ("gate_proj", "up_proj")) for layer in prepared.model.layers]
    assert [reason is None for reason in reasons] == [True, False, True, False]
    details = hf_rocm.explain(prepared).details()
    assert MOVED in details and "steps run uncaptured: some of the model's weights are offloaded" in details
    assert "meta device" not in details
    for name, model in (("prepared", prepared), ("stock", stock)):
        model.save_pretrained(tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("prepared", "stock")]
    assert files[0] == files[1]
    expected = generate(stock, make_inputs(), new=24)
    hf_rocm.restore(prepared)
    assert hooks(prepared) == hooks(stock) and torch.equal(generate(prepared, make_inputs(), new=24), expected)


def test_layers_that_do_not_fit_are_offloaded_as_in_stock(checkpoint):
    """accelerate places the first layers on the GPU and the others on the CPU."""
    embeddings, layer = 4 * 503 * 256, 4 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512)
    # accelerate may reserve memory for an offloaded layer.
    memory = {0: embeddings + 7 * layer // 2, "cpu": "4GiB"}
    folder = checkpoint("llama")
    prepared, stock = (load(folder, prepared=flag, device_map="auto", max_memory=memory) for flag in (True, False))
    on_gpu = sum(not layer.mlp.up_proj.weight.is_meta for layer in stock.model.layers)
    assert 0 < on_gpu < 4
    same_as_stock(prepared, stock, groups=2 * on_gpu)


@pytest.mark.parametrize("mapping", ["auto", {"": 0}])
def test_a_device_map_with_one_gpu_adds_no_hooks(mapping, checkpoint):
    """The model gets no hooks, and its steps are recorded as without a device map."""
    folder = checkpoint("llama")
    memory = {"max_memory": {0: "4GiB"}} if mapping == "auto" else {}
    prepared, stock = (load(folder, prepared=flag, device_map=mapping, **memory) for flag in (True, False))
    assert not hooks(prepared)
    assert torch.equal(generate(prepared, make_inputs(), new=24), generate(stock, make_inputs(), new=24))
    assert live(prepared) == GROUPS and counted(prepared)[1] > 0


@needs_two_gpus
@pytest.mark.parametrize("kind", KINDS)
def test_layers_on_two_gpus_run_as_in_stock(kind, checkpoint):
    folder = checkpoint(kind)
    placement = make_device_map(0, 0, 1, 1, tied=kind == "gemma2")
    prepared, stock = (load(folder, prepared=flag, device_map=placement) for flag in (True, False))
    same_as_stock(prepared, stock, groups=GROUPS)
    devices = [torch.device("cuda", index) for index in (0, 0, 1, 1)]
    assert cache_devices(prepared) == cache_devices(stock) == [(device, device) for device in devices]
    assert [layer.mlp.up_proj.weight.device for layer in prepared.model.layers] == devices
    assert "steps run uncaptured: the model is on 2 devices" in hf_rocm.explain(prepared).details()
    settings = {"do_sample": True, "top_k": 40, "seed": 1}
    assert torch.equal(generate(prepared, make_inputs(), **settings), generate(stock, make_inputs(), **settings))
    assert torch.equal(generate(prepared, make_inputs(), num_beams=3), generate(stock, make_inputs(), num_beams=3))


@needs_two_gpus
def test_layers_on_alternating_devices_run_as_in_stock(checkpoint):
    folder = checkpoint("llama")
    prepared, stock = (load(folder, prepared=flag, device_map=make_device_map(0, 1, 0, 1)) for flag in (True, False))
    same_as_stock(prepared, stock, groups=GROUPS)
    assert len(set(map(str, cache_devices(prepared)))) == 2


@needs_two_gpus
def test_a_balanced_device_map_runs_as_in_stock(checkpoint):
    folder = checkpoint("llama")
    prepared, stock = (load(folder, prepared=flag, device_map="balanced") for flag in (True, False))
    assert len(set(prepared.hf_device_map.values())) == 2
    same_as_stock(prepared, stock, groups=GROUPS)


@needs_two_gpus
def test_required_recorded_steps_are_refused(checkpoint):
    prepared = load(checkpoint("llama"), prepared=True, device_map=make_device_map(0, 0, 1, 1), graphs=True)
    with pytest.raises(GraphError, match="on 2 devices"):
        generate(prepared, make_inputs())
