"""accelerate's device maps and offloading: hooks, tokens and files equal stock's; layers that are not moved are fused.

Without a GPU, layers are placed on the CPU and on disk; tests/gpu/test_device_maps.py tests device maps with GPUs.
"""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_submodules
from safetensors import SafetensorError
from transformers import LlamaForCausalLM

import hf_rocm
from hf_rocm import ops
from hf_rocm.weights.fuse import why_not
from tests.distributed import launch
from tests.tolerance import assert_as_good_as_eager
from tests.weights import models
from tests.weights.models import IDS, assert_matches_stock, assert_same_results, live, logits

LAYERS = 3
GROUPS = 2 * LAYERS
# ignore transformers' warnings about offloaded models
pytestmark = [
    pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids` being on a device:UserWarning"),
]

REST = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
ON_CPU = dict.fromkeys(REST, "cpu")
MOVED = "run by a hook (AlignDevicesHook) that may move its weights"

# arguments besides the checkpoint, and the number of fused groups
MAPS = {
    "auto": ({"device_map": "auto"}, GROUPS),
    "balanced": ({"device_map": "balanced"}, GROUPS),
    "sequential": ({"device_map": "sequential"}, GROUPS),
    "one device": ({"device_map": {"": "cpu"}}, GROUPS),
    "two entries": ({"device_map": {"model": "cpu", "lm_head": "cpu"}}, GROUPS),
    "a layer on disk": (
        {"device_map": {**ON_CPU, "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}},
        GROUPS - 2,
    ),
    "an MLP on disk": (
        {
            "device_map": {
                **ON_CPU,
                **{f"model.layers.{n}": "cpu" for n in (0, 2)},
                **{f"model.layers.1.{part}": "cpu" for part in ("self_attn", "input_layernorm")},
                "model.layers.1.post_attention_layernorm": "cpu",
                "model.layers.1.mlp": "disk",
            }
        },
        GROUPS - 1,
    ),
    "buffers too": ({"device_map": {**ON_CPU, "model.layers": "disk"}, "offload_buffers": True}, 0),
    "as memory allows": ({"device_map": "auto", "max_memory": {"cpu": 200_000}}, 0),
}


def build():
    return models.build(num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    build().save_pretrained(folder)
    return folder


@pytest.fixture
def stock(checkpoint):
    return LlamaForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture
def model(checkpoint):
    loaded = hf_rocm.from_pretrained(checkpoint, force=True).eval()
    assert live(loaded) == GROUPS
    return loaded


def hooks(model):
    """accelerate's hooks on all modules, in order, with their settings."""
    return {
        path: _settings(hook) for path, module in model.named_modules() if (hook := module.__dict__.get("_hf_hook"))
    }


def _settings(hook):
    if isinstance(hook, SequentialHook):
        return [_settings(inner) for inner in hook.hooks]
    plain = {name: value for name, value in vars(hook).items() if isinstance(value, bool | int | str | tuple | None)}
    return type(hook), str(getattr(hook, "execution_device", None)), plain


def tokens(model):
    return model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)


def as_good_as(stock, model, reference):
    """Check that logits are as accurate as stock's (bitwise equal without fused groups), and that tokens are equal."""
    eager, actual = logits(stock), logits(model)
    if live(model) == 0:
        assert torch.equal(actual, eager)
    assert_as_good_as_eager(actual, eager, logits(reference))
    assert torch.equal(tokens(model), tokens(stock))


@pytest.mark.parametrize("name", MAPS)
def test_models_with_a_device_map_equal_stock(checkpoint, tmp_path, name):
    arguments, groups = MAPS[name]
    placed = LlamaForCausalLM.from_pretrained(checkpoint, offload_folder=tmp_path / "stock", **arguments).eval()
    prepared = hf_rocm.from_pretrained(checkpoint, offload_folder=tmp_path / "prepared", force=True, **arguments).eval()
    assert getattr(prepared, "hf_device_map", None) == getattr(placed, "hf_device_map", None)
    assert hooks(prepared) == hooks(placed)
    assert list(hooks(prepared)) == list(hooks(placed))
    # Without offloading, there are no hooks.
    assert bool(hooks(prepared)) is (groups < GROUPS)
    as_good_as(placed, prepared, build().double())
    with ops.recording() as routes:
        logits(prepared)
    assert sum(route.operation == "linear" for route in routes) == groups == live(prepared)
    assert [route.operation for route in routes].count("attention") == LAYERS
    explanation = hf_rocm.explain(prepared)
    with torch.no_grad():
        reasons = [why_not(module, names) for module, names in _groups(prepared)]
    assert sum(reason is None for reason in reasons) == groups
    assert all(reason is None or MOVED in reason for reason in reasons)
    assert sum(part.fused for part in explanation.parts) == groups
    assert (MOVED in str(explanation)) is (groups < GROUPS)
    assert saved(prepared, tmp_path) == saved(placed, tmp_path)
    hf_rocm.restore(prepared)
    assert hooks(prepared) == hooks(placed) and live(prepared) == 0
    assert_same_results(prepared, placed)


def saved(model, folder):
    model.save_pretrained(folder / "saved")
    return (folder / "saved" / "model.safetensors").read_bytes()


def _groups(model):
    for layer in model.model.layers:
        yield layer.self_attn, ("q_proj", "k_proj", "v_proj")
        yield layer.mlp, ("gate_proj", "up_proj")


def test_a_model_entirely_on_disk_runs_if_transformers_supports_it(checkpoint, tmp_path):
    """transformers 4.x can't load a model that is entirely on disk. hf_rocm can load one if transformers can."""
    arguments = {"device_map": {"": "disk"}, "offload_folder": tmp_path}
    try:
        placed = LlamaForCausalLM.from_pretrained(checkpoint, **arguments).eval()
    except SafetensorError as error:
        with pytest.raises(type(error), match=str(error)):
            hf_rocm.from_pretrained(checkpoint, force=True, **arguments)
        return
    prepared = hf_rocm.from_pretrained(checkpoint, force=True, **arguments).eval()
    assert hooks(prepared) == hooks(placed) and torch.equal(logits(prepared), logits(placed)) and live(prepared) == 0


FIRST = """
import sys
import torch
import hf_rocm
from hf_rocm import ops
from tests.distributed.test_accelerate import MAPS
from tests.generation.conftest import make

def ran(model):
    with torch.no_grad(), ops.recording() as routes:
        model(torch.tensor([[3, 1, 4]]), use_cache=False)
    return [route.operation for route in routes]

arguments, groups = MAPS["a layer on disk"]
model = hf_rocm.from_pretrained(sys.argv[1], force=True, offload_folder=sys.argv[2], **arguments).eval()
assert ran(model).count("linear") == groups, ran(model)

model = make("qwen3")
model(torch.tensor([[3, 1, 4]]), output_attentions=True, output_hidden_states=True)
hf_rocm.prepare(model, force=True)
assert ran(model).count("linear") == 4, ran(model)
assert "another forward" not in hf_rocm.explain(model).details()
"""


@pytest.mark.slow
def test_the_first_model_of_a_process_binds_its_overlay_after_hooks_are_set(checkpoint, tmp_path):
    """The model's overlay is bound after accelerate's hooks, or transformers' output-collecting hooks, are set."""
    (result,) = launch.run_ranks(FIRST, checkpoint, tmp_path, world=1, timeout=120)
    assert result.code == 0, result.log[-2000:]


def test_a_forward_wrapped_by_a_hook_is_reported(model):
    """If a forward was set on a module before the hook was added, that forward is called instead of hf_rocm's."""
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: x * 2
    assert "another forward × 1" in hf_rocm.explain(model).details()
    _dispatch_in_place(model, None)
    assert "another forward × 1" in hf_rocm.explain(model).details()
    with torch.no_grad():
        assert torch.equal(mlp(torch.ones(1, 64)), torch.full((1, 64), 2.0))


def _cpu_offload(model, folder):
    accelerate.cpu_offload(model, execution_device="cpu")


def _disk_offload(model, folder):
    accelerate.disk_offload(model, folder, execution_device="cpu")


def _dispatch(model, folder):
    device_map = MAPS["a layer on disk"][0]["device_map"]
    accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=folder)


def _dispatch_in_place(model, folder):
    accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)


@pytest.mark.parametrize(
    ("place", "groups"),
    [(_cpu_offload, 0), (_disk_offload, 0), (_dispatch, GROUPS - 2), (_dispatch_in_place, GROUPS)],
)
def test_a_prepared_model_can_be_dispatched_and_restored(model, stock, tmp_path, place, groups):
    """`remove_hook_from_submodules` moves the weights back; `prepare` fuses moved weights again."""
    for variant, folder in ((model, "prepared"), (stock, "stock")):
        place(variant, tmp_path / folder)
    assert hooks(model) == hooks(stock)
    as_good_as(stock, model, build().double())
    assert live(model) == groups
    with torch.no_grad():
        reasons = [why_not(*group) for group in _groups(model)]
    assert [reason is None or MOVED in reason for reason in reasons] == [True] * GROUPS
    assert sum(reason is None for reason in reasons) == groups
    twin = copy.deepcopy(model)
    assert hooks(twin) == hooks(model)
    torch.testing.assert_close(logits(twin), logits(model))
    for variant in (model, stock):
        remove_hook_from_submodules(variant)
    assert not hooks(model)
    assert_matches_stock(model, groups, twin=build())
    assert ("were replaced or moved after fusing" in hf_rocm.explain(model).details()) is (groups < GROUPS)
    hf_rocm.prepare(model, force=True)
    assert_matches_stock(model, GROUPS, twin=build())
    hf_rocm.restore(model)
    assert live(model) == 0
    assert_same_results(model, stock)


class Counts(ModelHook):
    """A user's hook that records its calls."""

    def __init__(self, events):
        self.events = events

    def pre_forward(self, module, *args, **kwargs):
        self.events.append("before")
        return args, kwargs

    def post_forward(self, module, output):
        self.events.append("after")
        return output


def test_a_user_hook_runs_in_addition_to_accelerates(model, stock):
    """User hooks are called in order. A group with a hook on one of its projections runs unfused until the hook is
    removed."""
    messages = {}
    for variant in (model, stock):
        _dispatch_in_place(variant, None)
        layer = variant.model.layers[1]
        add_hook_to_module(layer.mlp.gate_proj, Counts(messages.setdefault(id(variant), [])), append=True)
        add_hook_to_module(layer.self_attn, Counts(messages[id(variant)]), append=True)
    assert hooks(model) == hooks(stock)
    torch.testing.assert_close(logits(model), logits(stock))
    assert messages[id(model)] == messages[id(stock)] == ["before", "after"] * 2
    assert live(model) == GROUPS - 1
    with torch.no_grad():
        assert "run by a hook (SequentialHook)" in why_not(model.model.layers[1].mlp, ("gate_proj", "up_proj"))
    remove_hook_from_submodules(model)
    assert_matches_stock(model, GROUPS, twin=build())
