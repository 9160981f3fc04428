"""The router: order, refusals, named tiers, switches, caching, and no graph breaks."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.errors import TierUnavailable
from hf_rocm.ops import registry
from hf_rocm.ops.registry import Implementation, Operation, Refusal
from hf_rocm.ops.specs.step import BeginStepCall
from tests.threads import running


class Spec(NamedTuple):
    device: torch.device
    size: int


CPU = torch.device("cpu")


@pytest.fixture
def operation(monkeypatch):
    """A test operation with aiter, torch and eager candidates, named `linear` so that the options of `linear` apply."""
    monkeypatch.setattr(registry, "_operations", dict(registry._operations))
    created = Operation("linear", Spec, lambda spec: iter(()))
    created.probes = []

    def probe(spec, device):
        created.probes.append(spec.size)
        return "its probe was wrong by 3" if spec.size == 13 else None

    def refuses(spec, device):
        return f"size {spec.size} is odd" if spec.size % 2 and spec.size != 13 else None

    created.register(Implementation("eager", "last", lambda spec, device: None, lambda: "eager"))
    created.register(Implementation("aiter", "first", refuses, lambda: "aiter", probe))
    created.register(Implementation("torch", "second", lambda spec, device: None, lambda: "torch"))
    return created


def test_tiers_are_tried_in_order_regardless_of_the_order_of_registration(operation):
    assert [route.tier for route in operation.implementations] == ["aiter", "torch", "eager"]
    assert operation.calls[(CPU, 2)]() == "aiter"


def test_a_refused_call_runs_in_the_next_tier_and_the_refusal_is_recorded(operation):
    choice = operation.choose((CPU, 3))
    assert choice.implementation.tier == "torch"
    assert choice.refusals == (Refusal("aiter", "first", "size 3 is odd"),)


def test_a_failed_probe_is_a_refusal_with_its_reason(operation):
    choice = operation.choose((CPU, 13))
    assert choice.implementation.tier == "torch"
    assert choice.refusals == (Refusal("aiter", "first", "its probe was wrong by 3"),)


def test_probes_can_be_switched_off(operation):
    with options.override(probe=False):
        assert operation.choose((CPU, 13)).implementation.tier == "aiter"
    assert operation.probes == []


def test_a_choice_is_made_once(operation):
    for _ in range(3):
        operation.calls[(CPU, 2)]
    assert operation.probes == [2]


def test_a_named_tier_serves_or_raises_with_every_reason(operation):
    with options.override(tier="torch"):
        assert operation.calls[(CPU, 2)]() == "torch"
    with options.override(tier="aiter"), pytest.raises(TierUnavailable) as caught:
        operation.calls[(CPU, 3)]
    assert "aiter/first" in str(caught.value) and "size 3 is odd" in str(caught.value)
    assert "size=3" in str(caught.value)


def test_a_tier_without_an_implementation_raises(operation):
    with options.override(tier="triton"), pytest.raises(TierUnavailable, match="no triton implementation of linear"):
        operation.calls[(CPU, 2)]


def test_required_aiter_raises_instead_of_falling_back(operation):
    required = {**options.current().aiter, "linear": options.Switch.REQUIRED}
    with options.override(aiter=required):
        assert operation.calls[(CPU, 2)]() == "aiter"
        with pytest.raises(TierUnavailable, match="size 3 is odd"):
            operation.calls[(CPU, 3)]


def test_switched_off_aiter_is_skipped(operation):
    off = {**options.current().aiter, "linear": options.Switch.OFF}
    with options.override(aiter=off):
        choice = operation.choose((CPU, 2))
    assert choice.implementation.tier == "torch"
    assert choice.refusals[0].reason == "switched off by an environment variable"


def test_changed_options_invalidate_all_choices(operation):
    assert operation.calls[(CPU, 2)]() == "aiter"
    with options.override(tier="eager"):
        assert operation.calls[(CPU, 2)]() == "eager"
    assert operation.calls[(CPU, 2)]() == "aiter"


def test_recording_is_limited_to_its_block():
    x = torch.ones(2, 4)
    with ops.recording() as outer:
        ops.act_and_mul(x, activation="silu")
        with ops.recording() as inner:
            ops.rms_norm(x, torch.ones(4), eps=1e-6)
    ops.rms_norm(x, torch.ones(4), eps=1e-6)
    assert [route.operation for route in outer] == ["act_and_mul", "rms_norm"]
    assert [route.operation for route in inner] == ["rms_norm"]
    assert inner[0].shapes == ((2, 4), (4,))


# operation → (a call, the shapes that it records, which are not always those of its first arguments)
CALLS = {
    "linear": (lambda: ops.linear(ONES(2, 4), ONES(3, 4)), ((2, 4), (3, 4))),
    "add_rms_norm": (lambda: ops.add_rms_norm(ONES(2, 4), ONES(2, 4), ONES(4), eps=0.1), ((2, 4), (4,))),
    "add_layer_norm": (lambda: ops.add_layer_norm(ONES(2, 4), ONES(2, 4), ONES(4), eps=0.1), ((2, 4), (4,))),
    "norm_add": (lambda: ops.norm_add(ONES(2, 4), ONES(2, 4), ops.Norm(ONES(4), 0.1)), ((2, 4), (4,))),
    "act": (lambda: ops.act(ONES(2, 4), activation="quick_gelu"), ((2, 4),)),
    "act_and_mul": (lambda: ops.act_and_mul(ONES(2, 4), activation="silu"), ((2, 4),)),
    "rope": (lambda: ops.rope(*HEADS[:2], *ANGLES), ((1, 4, 1, 8), (1, 2, 1, 8))),
    "rotary_angles": (
        lambda: ops.rotary_angles(ONES(4), ONES(2, 3).long(), dtype=torch.float32),
        ((4,), (2, 3)),
    ),
    "rope_into_cache": (
        lambda: ops.rope_into_cache(
            *HEADS, *ANGLES, keys=ONES(1, 2, 5, 8), values=ONES(1, 2, 5, 6), position=torch.tensor([3])
        ),
        ((1, 4, 1, 8), (1, 2, 1, 8), (1, 2, 5, 8)),
    ),
    "attention": (lambda: ops.attention(*HEADS, scale=0.3), ((1, 4, 1, 8), (1, 2, 1, 8), (1, 2, 1, 6))),
    "append_tokens": (
        lambda: ops.append_tokens(ONES(2, 5).long(), ONES(2).long(), ONES(2).long()),
        ((2, 5),),
    ),
    "begin_step": (
        lambda: ops.begin_step(BeginStepCall(*ONES(2, 3, 1).long(), *[None] * 10, 0, *[None] * 3, False, 0, 0, 0, 0)),
        ((3, 1),),
    ),
    "look_up_drafts": (
        lambda: ops.look_up_drafts(ONES(1, 5).long(), *ONES(2, 1, 2).long(), ONES(2).long(), ngram=2),
        ((1, 5),),
    ),
    "finish_step": (
        lambda: ops.finish_step(ONES(2, 1, 8), ONES(2, 1, 8), ONES(2, 1).long(), ONES(5).long(), torch.zeros(())),
        ((2, 1, 8),),
    ),
    "choose_experts": (lambda: ops.choose_experts(ONES(3, 4), top=2), ((3, 4),)),
    "experts": (
        lambda: ops.experts(ONES(3, 4), ONES(5, 12, 4), ONES(5, 4, 6), torch.tensor([[0, 1]] * 3), ONES(3, 2)),
        ((3, 4), (5, 12, 4), (3, 2)),
    ),
    "experts_add": (
        lambda: ops.experts_add(
            ONES(3, 4), ONES(3, 4), ONES(5, 12, 4), ONES(5, 4, 6), torch.tensor([[0, 1]] * 3), ONES(3, 2)
        ),
        ((3, 4), (5, 12, 4), (3, 2)),
    ),
    "quantized_linear": (
        lambda: ops.quantized_linear(ONES(2, 4), ONES(3, 4).to(torch.int8), ONES(3)),
        ((2, 4), (3, 4)),
    ),
}
ONES = torch.ones
HEADS = (ONES(1, 4, 1, 8), ONES(1, 2, 1, 8), ONES(1, 2, 1, 6))
ANGLES = (ONES(1, 1, 8), ONES(1, 1, 8))


@pytest.mark.parametrize("name", CALLS)
def test_recording_collects_the_shapes_of_every_call(name):
    call, shapes = CALLS[name]
    # Select the implementation before recording starts.
    call()
    with torch.no_grad(), ops.recording() as routes:
        call()
        call()
    assert [route.shapes for route in routes if route.operation == name] == [shapes] * 2


def test_a_cached_lookup_runs_no_python_and_recording_leaves_no_trace(operation):
    plain = operation.calls[CPU, 2]
    assert plain is operation.implementations[0].call
    with ops.recording() as outer:
        assert operation.calls[CPU, 2] is not plain
        with ops.recording() as inner:
            pass
        assert operation.calls[CPU, 2] is not plain and inner == outer == []
    assert operation.calls[CPU, 2] is plain
    operation.calls.make = None
    assert operation.calls[CPU, 2] is plain


@pytest.mark.parametrize(("this_thread", "expected"), [(False, 2), (True, 1)])
def test_calls_of_other_threads_can_be_left_out(this_thread, expected):
    x = torch.ones(2, 4)
    with ops.recording(this_thread=this_thread) as routes:
        ops.act_and_mul(x, activation="silu")
        thread = threading.Thread(target=ops.act_and_mul, args=(x,), kwargs={"activation": "silu"})
        thread.start()
        thread.join()
    assert [route.operation for route in routes] == ["act_and_mul"] * expected


def test_threads_may_record_at_the_same_time():
    def record():
        for _ in range(500):
            with ops.recording(this_thread=True):
                pass

    with running(*[record] * 4) as failures:
        pass
    assert not failures and not registry._recorders


def test_watchers_get_results_of_operations_that_were_called_before():
    x, results = torch.ones(2, 4), []
    expected = ops.act_and_mul(x, activation="silu")
    with registry.watching(lambda name, result: results.append((name, result))) as routes:
        ops.act_and_mul(x, activation="silu")
    ops.act_and_mul(x, activation="silu")
    ((name, result),) = results
    assert name == "act_and_mul" and torch.equal(result, expected) and len(routes) == 1


def test_a_cached_choice_is_used_until_choices_are_dropped(operation):
    assert operation.calls[CPU, 2]() == "aiter"
    operation.keep(registry.Choice(Spec(CPU, 2), operation.implementations[1], ()))
    assert operation.calls[CPU, 2]() == "torch"
    operation.forget()
    assert operation.calls[CPU, 2]() == "aiter"


@pytest.mark.parametrize("tier", ["torch", "eager"])
def test_operations_compile_without_a_graph_break(tier):
    def operations(query, key, x, weight):
        attended, _ = ops.attention(query, key, key, scale=0.3, causal=True)
        normed = ops.rms_norm(ops.act_and_mul(x, activation="silu"), weight, eps=1e-6)
        return attended, ops.linear(normed, torch.eye(8))

    torch._dynamo.reset()
    compiled = torch.compile(operations, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), options.override(tier=tier):
        # The shape is dynamic from the second length on.
        for length in (7, 9, 12):
            arguments = (
                torch.randn(2, 4, length, 16),
                torch.randn(2, 2, length, 16),
                torch.randn(3, 16),
                torch.randn(8),
            )
            for actual, expected in zip(compiled(*arguments), operations(*arguments), strict=True):
                torch.testing.assert_close(actual, expected)
