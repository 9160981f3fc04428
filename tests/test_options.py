"""Options from valid and invalid environment variables."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hf_rocm import options, variables
from hf_rocm.errors import OptionError
from hf_rocm.generation import ledger
from hf_rocm.options import Switch, parse


def test_the_default_is_auto_for_all_operations():
    parsed = parse({})
    assert parsed.tiers == {} and parsed.probe
    assert set(parsed.aiter.values()) == {Switch.AUTO}


def test_a_tier_is_set_for_all_operations_or_per_operation():
    assert parse({"HF_ROCM_TIER": "torch"}).tiers == dict.fromkeys(options.OPERATIONS, "torch")
    assert parse({"HF_ROCM_TIER": "attention=torch, linear=eager"}).tiers == {"attention": "torch", "linear": "eager"}


@pytest.mark.parametrize("text", ["cuda", "attention", "attention=cuda", "attention=torch,,", "softmax=torch"])
def test_an_unknown_tier_is_named_with_the_known_ones(text):
    with pytest.raises(OptionError, match="HF_ROCM_TIER=") as caught:
        parse({"HF_ROCM_TIER": text})
    assert "attention" in str(caught.value) and "eager" in str(caught.value)


def test_aiter_switches_apply_to_their_operations():
    parsed = parse({"USE_AITER_ATTENTION": "1", "USE_AITER_GEMM": "0", "USE_OPTIMIZED_OPS": "0"})
    assert parsed.aiter == {
        "attention": Switch.REQUIRED,
        "linear": Switch.OFF,
        "act_and_mul": Switch.OFF,
        "rms_norm": Switch.OFF,
        "rope": Switch.OFF,
        "experts": Switch.AUTO,
    }


@pytest.mark.parametrize("name", ["USE_AITER_ATTENTION", "HF_ROCM_PROBE", "FORCE_EAGER_ATTENTION"])
def test_an_invalid_value_is_an_error(name):
    with pytest.raises(OptionError, match=f"{name}=maybe"):
        parse({name: "maybe"})


def test_force_eager_attention_selects_the_eager_tier():
    assert parse({"FORCE_EAGER_ATTENTION": "1"}).tier("attention") == "eager"
    with pytest.raises(OptionError, match="contradicts"):
        parse({"FORCE_EAGER_ATTENTION": "1", "HF_ROCM_TIER": "torch"})


def test_an_override_is_limited_to_its_block():
    before = options.current()
    with options.override(tier="eager") as inside:
        assert options.current() is inside and inside.tier("linear") == "eager"
    assert options.current() is before


def test_every_variable_that_is_read_is_listed():
    """The README's table is generated from VARIABLES; a variable that is read but not listed would be missing there."""
    import inspect
    import re

    read = set(re.findall(r'"((?:HF_ROCM|USE|FORCE|PRESHUFFLE|AITER_CONFIG)_[A-Z0-9_]+)"', inspect.getsource(options)))
    assert read == {variable.name for variable in options.VARIABLES}


def test_tuned_tables_are_distinguished_by_modification_time(monkeypatch, tmp_path):
    table = tmp_path / "tuned.csv"
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", f"{table}:{tmp_path / 'gone.csv'}")
    assert options.tuned_tables() == [(str(table), 0), (str(tmp_path / "gone.csv"), 0)]
    table.write_text("M,N,K")
    first = options.tuned_tables()
    os.utime(table, ns=(1, 1))
    assert first[0][1] > 1 and options.tuned_tables()[0] == (str(table), 1)


def test_preshuffling_has_defaults_and_is_configurable():
    parsed = parse({})
    assert (parsed.preshuffle, parsed.preshuffle_budget, parsed.preshuffle_threshold) == ("auto", "0", 128)
    requested = {"HF_ROCM_PRESHUFFLE": "all", "HF_ROCM_PRESHUFFLE_BUDGET": "25%", "PRESHUFFLE_M_THRESH": "-1"}
    parsed = parse(requested)
    assert (parsed.preshuffle, parsed.preshuffle_budget, parsed.preshuffle_threshold) == ("all", "25%", -1)
    assert (parse({}).pad_tokens, parse({"HF_ROCM_PAD_TOKENS": "0"}).pad_tokens) == (16384, 0)


@pytest.mark.parametrize(
    ("name", "text"), [("PRESHUFFLE_M_THRESH", "-2"), ("PRESHUFFLE_M_THRESH", "many"), ("HF_ROCM_PAD_TOKENS", "-1")]
)
def test_invalid_thresholds_and_modes_are_refused(name, text):
    with pytest.raises(OptionError, match=f"{name}={text}"):
        parse({name: text})
    with pytest.raises(OptionError, match="HF_ROCM_PRESHUFFLE=some"):
        parse({"HF_ROCM_PRESHUFFLE": "some"})


def test_changes_after_the_first_use_take_effect_with_the_next_refresh(monkeypatch):
    monkeypatch.delenv("HF_ROCM_TIER", raising=False)
    options.refresh()
    assert options.current().tier("linear") is None
    monkeypatch.setenv("HF_ROCM_TIER", "linear=eager")
    forgotten = []
    monkeypatch.setattr(options, "_forget_choices", lambda: forgotten.append(True))
    options.refresh()
    assert options.current().tier("linear") == "eager" and forgotten == [True]
    before = options.current()
    options.refresh()
    assert options.current() is before and forgotten == [True]
    monkeypatch.setenv("HF_ROCM_TIER", "linear=fast")
    options.refresh()
    with pytest.raises(OptionError, match="HF_ROCM_TIER=linear=fast"):
        options.current()
    monkeypatch.undo()
    options.refresh()
    assert options.current().tier("linear") is None


@pytest.mark.parametrize(
    ("text", "unknown"),
    [("foo", "tier 'foo'"), ("linear=foo", "tier 'foo'"), ("liner=eager", "operation 'liner'"), ("linear=", "tier ''")],
)
def test_an_unknown_tier_or_operation_is_named(text, unknown):
    with pytest.raises(OptionError) as caught:
        options.parse({"HF_ROCM_TIER": text})
    assert caught.value.message == f"HF_ROCM_TIER={text}: unknown {unknown}"


def test_a_misspelt_variable_is_named_once_with_the_most_similar_one(monkeypatch, caplog):
    monkeypatch.setenv("HF_ROCM_FROCE", "1")
    monkeypatch.setenv("HF_ROCM_WEATHER", "1")
    monkeypatch.setenv("USE_AITER_ATENTION", "1")
    # This is an option of transformers.
    monkeypatch.setenv("USE_TORCH", "1")
    monkeypatch.setattr(variables, "_warned", set())
    for _ in range(2):
        options.refresh()
    assert [record.getMessage() for record in caplog.records] == [
        "HF_ROCM_FROCE is not an option of hf_rocm; did you mean HF_ROCM_FORCE?",
        "HF_ROCM_WEATHER is not an option of hf_rocm",
        "USE_AITER_ATENTION is not an option of hf_rocm; did you mean USE_AITER_ATTENTION?",
    ]


def test_tests_and_their_child_processes_do_not_use_the_users_cache_folder(scratch_cache, tmp_path_factory):
    assert scratch_cache.is_relative_to(tmp_path_factory.getbasetemp())
    code = "from hf_rocm.generation import ledger; print(ledger.path())"
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    assert child == str(ledger.path()) == str(scratch_cache / ledger.NAME)
