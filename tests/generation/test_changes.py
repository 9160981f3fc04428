"""Changes to a model between two calls take effect in the second one: outdated recordings are not replayed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hf_rocm
from hf_rocm.generation import decide
from hf_rocm.generation.state import known
from tests.generation.conftest import counted, generate, make, prompt


class Adapter(nn.Module):
    """An adapter around a layer. Like PEFT's adapters, it is switched and scaled by plain attributes."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora = nn.ModuleDict()
        for seed, name in enumerate("ab"):
            torch.manual_seed(seed)
            self.lora[name] = nn.Linear(base.in_features, base.out_features, bias=False)
        self.active_adapters, self.scaling = ["a"], {"a": 1.0, "b": 1.0}

    def forward(self, x):
        result = self.base_layer(x)
        for name in self.active_adapters:
            result = result + self.lora[name](x) * self.scaling[name]
        return result


def value_projection(model):
    return model.model.layers[0].self_attn.v_proj


# The adapter appears to belong to PEFT; a user's own class would be refused.
Adapter.__module__ = "peft.tuners.lora.layer"


def moved(model):
    value_projection(model).weight.data = value_projection(model).weight.data * -1.5


def written(model):
    with torch.no_grad():
        value_projection(model).weight.mul_(-1.5)


def replaced(model):
    value_projection(model).weight = nn.Parameter(value_projection(model).weight.detach() * -1.5)


def loaded(model):
    model.load_state_dict({name: tensor * 0.7 for name, tensor in model.state_dict().items()})


def adapted(model):
    attention = model.model.layers[0].self_attn
    attention.v_proj = Adapter(attention.v_proj)


def in_eager(model):
    model.config._attn_implementation = "eager"


def normalised(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 9.0


@pytest.mark.parametrize("change", [moved, written, replaced, loaded, adapted, in_eager, normalised])
def test_a_change_takes_effect_in_the_next_call(change, pair):
    prepared, stock = pair()
    before = generate(stock)
    for _ in range(2):
        assert torch.equal(generate(prepared), before)
    for model in (prepared, stock):
        change(model)
    after = generate(stock)
    replayed = counted(prepared)[1]
    for _ in range(2):
        assert torch.equal(generate(prepared), after)
    assert counted(prepared)[1] > replayed and known(prepared).disabled is None
    assert change is in_eager or not torch.equal(before, after)


def test_switching_back_to_an_adapter_records_nothing(pair):
    """Every combination of adapter and scale has its own recording, and switching back to one records nothing."""
    prepared, stock = pair()
    for model in (prepared, stock):
        adapted(model)
    recorded = []
    for active, scale in (("a", 1.0), ("b", 1.0), ("a", 1.0), ("b", 2.0), ("b", 1.0), ("a", 1.0)):
        for model in (prepared, stock):
            value_projection(model).active_adapters = [active]
            value_projection(model).scaling["b"] = scale
        assert torch.equal(generate(prepared), generate(stock))
        recorded.append(counted(prepared)[0])
    assert recorded == [1, 2, 2, 3, 3, 3]


def test_no_recording_of_a_moved_weight_is_replayed(pair):
    """The fused block of the old weights is used neither in uncaptured nor in recorded steps."""
    prepared, stock = pair()
    generate(prepared)
    for _ in range(3):
        moved(prepared)
        moved(stock)
        assert torch.equal(generate(prepared), generate(stock))
    assert counted(prepared)[0] == 4


def test_a_copy_decodes_with_its_own_weights(pair):
    prepared, stock = pair()
    generate(prepared)
    twin, stock_twin = copy.deepcopy(prepared), copy.deepcopy(stock)
    assert known(twin) is None
    for model in (twin, stock_twin):
        written(model)
    assert torch.equal(generate(twin), generate(stock_twin))
    assert torch.equal(generate(prepared), generate(stock))
    assert not torch.equal(generate(twin), generate(prepared))
    assert counted(twin)[1] and counted(prepared)[0] == 1


def test_a_pickled_model_decodes_again(pair):
    prepared, stock = pair()
    generate(prepared)
    again = pickle.loads(pickle.dumps(prepared))
    assert torch.equal(generate(again), generate(stock))
    assert counted(again)[1]


def test_preparing_twice_keeps_the_setting_and_restore_frees_the_state(pair):
    prepared, stock = pair()
    generate(prepared)
    assert hf_rocm.prepare(prepared, force=True) is prepared
    assert torch.equal(generate(prepared), generate(stock))
    # Graphs are still required, because the first call to `prepare` required them.
    assert counted(prepared)[1]
    hf_rocm.restore(prepared)
    assert known(prepared) is None and not any(name.startswith("_hf_rocm") for name in prepared.__dict__)
    assert torch.equal(generate(prepared), generate(stock))
    assert known(prepared) is None


def test_the_windows_follow_the_config():
    model = make("mistral")
    if decide.windows(model) == [None, None]:
        pytest.skip("in this release, sliding layers differ only in their masks")
    assert decide.windows(model) == [10, 10] and decide.windows(model) is decide.windows(model)
    model.config.sliding_window = 12
    assert decide.windows(model) == [12, 12]
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert decide.windows(model) == [None, 12]
    model.config.layer_types[1] = "full_attention"
    assert decide.windows(model) == [None, None]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("token", range(3, 12))
def test_weights_written_in_place_during_a_call_take_effect_in_the_next_step(token, streamed, pair):
    """Comparisons recompute earlier steps only if they ran with the same weights."""
    prepared, stock = pair(graphs=None)
    results = []

    class Writer:
        """A streamer, or a stopping criterion, that writes weights after some tokens."""

        def __init__(self, model):
            self.model, self.seen = model, 0

        def put(self, _):
            self.seen += 1
            if self.seen == token:
                written(self.model)

        def end(self):
            pass

        def __call__(self, ids, scores, **_):
            self.put(ids)
            return torch.zeros(len(ids), dtype=torch.bool)

    for model in (prepared, stock):
        writer = Writer(model)
        user = {"streamer": writer} if streamed else {"stopping_criteria": [writer]}
        results.append(generate(model, prompt(rows=1), new=16, **user))
    assert torch.equal(*results) and known(prepared).disabled is None
    assert torch.equal(generate(prepared), generate(stock)) and counted(prepared)[1]


def test_another_attention_kernel_is_recorded_anew(pair):
    prepared, stock = pair()
    for _ in range(4):
        assert torch.equal(generate(prepared), generate(stock))
    recorded = counted(prepared)[0]
    for _ in range(3):
        with sdpa_kernel(SDPBackend.MATH):
            assert torch.equal(generate(prepared), generate(stock))
    assert counted(prepared)[0] == recorded + 1 and known(prepared).disabled is None
