"""Calls that run uncaptured return stock's results, and the reason is recorded."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hf_rocm
from hf_rocm.device import Device, simulated
from hf_rocm.errors import GraphError
from hf_rocm.forwards.state import known
from hf_rocm.generation import ledger, recorder
from tests.forwards.conftest import call, close, counted, equal, reasons, recorder_with
from tests.forwards.families import inputs, make
from tests.generation import faults
from tests.generation.emulator import EmulatedRecorder


def scaled_by_calls(model):
    calls = iter(range(1, 10**6))
    model.pooler.register_forward_hook(lambda module, args, output: output * next(calls))


def patched(model):
    dense, calls = model.pooler.dense, iter(range(1, 10**6))
    dense.forward = MethodType(lambda self, x: nn.Linear.forward(self, x) * next(calls), dense)


class Counting(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(x) * self.calls


def replaced(model):
    model.pooler.activation = Counting()


@pytest.mark.parametrize(
    ("change", "reason"),
    [(scaled_by_calls, "the hook of pooler"), (patched, "set on pooler.dense"), (replaced, "of type Counting")],
)
def test_hooks_and_replaced_forwards_run_in_every_call(change, reason, pair):
    prepared, stock = pair()
    for _ in range(5):
        call(prepared, inputs("bert"))
    replayed = counted(prepared)[1]
    assert replayed
    for model in (prepared, stock):
        change(model)
    for _ in range(4):
        assert equal(call(prepared, inputs("bert")), call(stock, inputs("bert")))
    assert counted(prepared)[1] == replayed and any(reason in line for line in reasons(prepared))


def _scaled(function, kind):
    def changed(self, *args, **kwargs):
        output = function(self, *args, **kwargs)
        return output * 0.5 if type(self) is kind else output

    return changed


@pytest.mark.parametrize("replayed", [True, False])
@pytest.mark.parametrize(
    ("owner", "name", "kind"),
    [
        (nn.LayerNorm, "__call__", nn.LayerNorm),
        (nn.Linear, "__call__", nn.Linear),
        (nn.Dropout, "__call__", nn.Dropout),
        (nn.Module, "__call__", nn.LayerNorm),
        (nn.Module, "_call_impl", nn.LayerNorm),
        (nn.Linear, "_call_impl", nn.Linear),
        (nn.LayerNorm, "forward", nn.LayerNorm),
        (nn.Dropout, "forward", nn.Dropout),
    ],
)
def test_replaced_methods_of_pytorchs_classes_are_called(owner, name, kind, replayed, recorded_on_cpu, monkeypatch):
    """The methods are replaced before the first call, or after calls that were replayed."""
    stock = make("bert")
    prepared, arguments = hf_rocm.prepare(copy.deepcopy(stock), force=True), inputs("bert")
    before = call(stock, arguments)
    for _ in range(5 if replayed else 0):
        call(prepared, arguments)
    count = counted(prepared)[1] if replayed else 0
    assert bool(count) is replayed
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _scaled(getattr(owner, name), kind), raising=False)
        expected = call(stock, arguments)
        results = [call(prepared, arguments) for _ in range(4)]
    assert not close(expected, before) and all(close(result, expected) for result in results)
    assert counted(prepared)[1] == count
    assert close(call(prepared, arguments), before)


def _nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class Subclass(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make_tensor", "reason"),
    [
        (lambda: torch.eye(3).to_sparse(), "is sparse"),
        (lambda: torch.eye(3).to_sparse_csr(), "is sparse"),
        (lambda: torch.ones(3).to_mkldnn(), "has the layout"),
        (_nested, "is nested"),
        (lambda: torch.ones(3).as_subclass(Subclass), "is of type Subclass"),
    ],
)
def test_models_with_attributes_that_are_not_plain_tensors_run_uncaptured(make_tensor, reason, pair):
    prepared, stock = pair()
    arguments = inputs("bert")
    for _ in range(5):
        call(prepared, arguments)
    replayed = counted(prepared)[1]
    prepared.pooler.table = make_tensor()
    for _ in range(4):
        assert equal(call(prepared, arguments), call(stock, arguments))
    assert counted(prepared)[1] == replayed and f"table {reason}" in " ".join(reasons(prepared))
    del prepared.pooler.table
    call(prepared, arguments)
    assert counted(prepared)[1] == replayed + 1


def test_a_hook_on_the_model_runs_in_every_call(pair):
    prepared, stock = pair()
    for model in (prepared, stock):
        scaled_by_calls(model)
        model.pooler._forward_hooks.clear()
        calls = iter(range(10**6))
        model.register_forward_hook(lambda module, args, output, calls=calls: (output[0] * next(calls),))
    for _ in range(4):
        assert equal(call(prepared, inputs("bert")), call(stock, inputs("bert")))


def in_training(model):
    model.train()


def in_one_layer(model):
    model.encoder.layer[0].attention.self.dropout.train()


@pytest.mark.parametrize("change", [in_training, in_one_layer])
def test_dropout_runs_uncaptured(change, pair):
    prepared, stock = pair()
    for _ in range(5):
        call(prepared, inputs("bert"))
    results = []
    for model in (prepared, stock):
        change(model)
        torch.manual_seed(0)
        results.append([call(model, inputs("bert")) for _ in range(3)])
    assert all(equal(one, other) for one, other in zip(*results, strict=True))
    assert any("in training mode" in reason for reason in reasons(prepared))


def test_forwards_that_draw_random_numbers_run_uncaptured(pair):
    def noisy(module, args, output):
        return output + torch.rand(output.shape[-1])

    noisy.__module__ = "transformers"
    prepared, stock = pair()
    results = []
    for model in (prepared, stock):
        model.pooler.register_forward_hook(noisy)
        torch.manual_seed(0)
        results.append([call(model, inputs("bert")) for _ in range(4)])
    assert all(equal(one, other) for one, other in zip(*results, strict=True))
    assert counted(prepared) == (0, 0) and "it draws random numbers" in reasons(prepared)


def test_after_deactivate_the_stock_forward_is_recorded(pair):
    prepared, stock = pair()
    for _ in range(5):
        call(prepared, inputs("bert"))
    recorded = counted(prepared)[0]
    hf_rocm.deactivate()
    for seed in range(3):
        arguments = inputs("bert", seed=seed)
        assert equal(call(prepared, arguments), call(stock, arguments))
    assert counted(prepared)[0] == recorded + 1


def test_calls_with_gradients_run_uncaptured(pair):
    prepared, stock = pair()
    for _ in range(5):
        call(prepared, inputs("bert"))
    for model in (prepared, stock):
        model(**inputs("bert")).last_hidden_state.sum().backward()
    weights = [model.embeddings.word_embeddings.weight.grad for model in (prepared, stock)]
    assert torch.equal(*weights) and reasons(prepared) == [
        "gradients are enabled (torch.no_grad() and torch.inference_mode() disable them)"
    ]


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(pixel_values=x).logits


@pytest.mark.filterwarnings("ignore")
def test_autocast_modes_and_transforms_run_uncaptured(pair):
    prepared, stock = pair("vit")
    arguments = inputs("vit")
    for _ in range(5):
        call(prepared, arguments)
    replayed = counted(prepared)[1]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert equal(prepared(**arguments), stock(**arguments))
    with FlopCounterMode(display=False) as flops:
        call(prepared, arguments)
    assert flops.get_total_flops() > 0
    with torch.no_grad():
        torch.vmap(lambda x: prepared(pixel_values=x).logits)(arguments["pixel_values"][None])
        torch.jit.trace(Logits(prepared), arguments["pixel_values"], check_trace=False)
    assert counted(prepared)[1] == replayed
    assert set(reasons(prepared)) >= {
        "another tool observes or transforms the call",
        "the call is traced",
        "autocast caches copies of the weights and frees them when it ends",
    }


def test_a_compiled_model_records_nothing(pair):
    prepared, stock = pair("vit")
    arguments = inputs("vit")
    torch._dynamo.reset()
    compiled = torch.compile(prepared, backend="eager", fullgraph=True)
    for _ in range(4):
        assert equal(call(compiled, arguments), call(stock, arguments))
    assert known(prepared) is None or counted(prepared) == (0, 0)
    torch._dynamo.reset()


def test_an_output_with_a_cache_is_not_recorded(recorded_on_cpu):
    torch.manual_seed(0)
    config = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    stock = transformers.LlamaModel(transformers.LlamaConfig(**config, num_hidden_layers=1)).eval()
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    ids = {"input_ids": torch.arange(3, 10)[None]}
    for _ in range(4):
        assert call(prepared, ids).past_key_values.get_seq_length() == 7
    assert counted(prepared) == (0, 0) and "it returns past_key_values as DynamicCache" in reasons(prepared)
    for _ in range(4):
        arguments = {**ids, "use_cache": False}
        torch.testing.assert_close(
            call(prepared, arguments).last_hidden_state, call(stock, arguments).last_hidden_state
        )
    assert counted(prepared)[1] == 1


def test_a_read_of_a_computed_value_is_not_recorded(pair):
    def doubled(module, args, output):
        return output * 2 if output.sum() > 0 else output

    # A user's own hook would be refused.
    doubled.__module__ = "transformers"
    prepared, stock = pair()
    for model in (prepared, stock):
        model.pooler.register_forward_hook(doubled)
    for seed in range(6):
        arguments = inputs("bert", seed=seed)
        assert equal(call(prepared, arguments), call(stock, arguments))
    assert counted(prepared) == (0, 0) and reasons(prepared)[0].startswith("it reads a value on the host that it has")


def test_each_path_of_dependent_host_reads_has_a_recording(pair):
    """Only one of two paths reads a second value. Each of the two possible second values has a separate recording."""

    def chosen(module, args, kwargs):
        ids = kwargs["input_ids"]
        if ids[0, 0] > 30 and bool((ids[0, 1:3] > 30).any()):
            return args, {**kwargs, "input_ids": ids.flip(1)}
        return args, kwargs

    chosen.__module__ = "transformers"
    prepared, stock = pair()
    for model in (prepared, stock):
        model.embeddings.register_forward_pre_hook(chosen, with_kwargs=True)
    for seed in range(40):
        arguments = inputs("bert", seed=seed)
        assert equal(call(prepared, arguments), call(stock, arguments))
    assert counted(prepared)[0] == 3 and counted(prepared)[1] > 10


@pytest.mark.usefixtures("exact_lengths")
def test_a_failed_recording_does_not_affect_results(pair, monkeypatch):
    class Failing(EmulatedRecorder):
        def record(self, run):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setitem(recorder.factories, "cpu", Failing)
    prepared, stock = pair()
    for length in range(3, 9):
        for seed in range(3):
            arguments = inputs("bert", length=length, seed=seed)
            assert equal(call(prepared, arguments), call(stock, arguments))
    reason = "the forward can't be recorded: operation not permitted when stream is capturing"
    # after four shapes that can't be recorded, nothing more is recorded
    assert reasons(prepared) == [reason] and known(prepared).disabled == reason


def test_required_graphs_raise_if_recording_fails(pair, monkeypatch):
    prepared, _ = pair(graphs=True)
    # Not recorded, because gradients are enabled.
    prepared(**inputs("bert"))
    assert len(reasons(prepared)) == 1
    monkeypatch.setitem(recorder.factories, "cpu", recorder_with(faults.garbage, first=1))
    prepared, _ = pair("vit", graphs=True)
    with pytest.raises(GraphError, match="graphs are required"):
        for _ in range(4):
            call(prepared, inputs("vit"))
    whole = make("bert")
    whole.forward = whole.forward
    with pytest.raises(GraphError, match="graphs are required"):
        hf_rocm.prepare(whole, force=True, graphs=True)


def test_nothing_is_recorded_with_a_known_fault(recorded_on_cpu, monkeypatch):
    monkeypatch.setattr(torch.version, "rocm", "7.2.1", raising=False)
    with simulated("cpu", Device("cpu", rocm=True, arch="gfx942")):
        prepared = hf_rocm.prepare(make("bert"), force=True)
        (line,) = hf_rocm.explain(prepared).forwards
    assert "gfx942" in line and "HF_ROCM_GRAPHS=1" in line


@pytest.mark.parametrize("first", [1, 2, 4, 6])
@pytest.mark.parametrize("fault", [faults.garbage, faults.gemm_dropped, faults.not_finite])
def test_a_wrong_replay_is_detected_at_the_next_comparison(fault, first, pair, monkeypatch):
    monkeypatch.setitem(recorder.factories, "cpu", recorder_with(fault, first=first))
    prepared, stock = pair()
    results = []
    for seed in range(14):
        arguments = inputs("bert", seed=seed)
        results.append(equal(call(prepared, arguments), call(stock, arguments)))
    compared = {1: 1, 2: 2, 4: 5, 6: 9}[first]
    (event,) = ledger.events()
    assert event.replays == compared and event.model == "BertModel" and event.operators > 20
    assert results.count(False) == event.unproven == compared - first
    assert event.reason in known(prepared).disabled and known(prepared).summary() == (0, 0)
