"""First-use checks, in real child processes except for simulated releases: wrong kernels are detected, reported once,
and not used."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from packaging.version import Version

from hf_rocm import ops, options
from hf_rocm.ops import probe, probe_cases, probe_worker, registry
from hf_rocm.ops.specs.attention import AttentionSpec
from tests.aiter import recorded

BF16 = torch.bfloat16
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("kernels", "mi300x")


def attend(window=None, sinks=False, head_dim=16, length=5):
    query, key = (torch.randn(1, heads, length, head_dim, dtype=BF16) for heads in (4, 2))
    sink = torch.zeros(4, dtype=BF16) if sinks else None
    with torch.no_grad(), ops.recording() as routes:
        ops.attention(query, key, key, scale=0.25, causal=True, window=window, sinks=sink)
    return routes[0]


def linear():
    with torch.no_grad(), ops.recording() as routes:
        ops.linear(torch.randn(2, 16, dtype=BF16), torch.randn(8, 16, dtype=BF16))
    return routes[0]


def norm():
    with torch.no_grad(), ops.recording() as routes:
        ops.rms_norm(torch.randn(2, 16, dtype=BF16), torch.ones(16, dtype=BF16), eps=1e-6)
    return routes[0]


def activation():
    with torch.no_grad(), ops.recording() as routes:
        ops.act_and_mul(torch.randn(2, 16, dtype=BF16), activation="silu")
    return routes[0]


def decode():
    query, key = torch.randn(1, 4, 1, 16, dtype=BF16), torch.randn(1, 2, 9, 16, dtype=BF16)
    with torch.no_grad(), ops.recording() as routes:
        ops.decode_attention(query, key, key, torch.tensor([5], dtype=torch.int32), scale=0.25)
    return routes[0]


def softcapped():
    query, key = torch.randn(1, 4, 9, 16, dtype=BF16), torch.randn(1, 2, 9, 16, dtype=BF16)
    with torch.no_grad(), ops.recording() as routes:
        ops.attention(query, key, key, scale=0.25, causal=True, softcap=1.0)
    return routes[0]


# kernel and fault → (the affected call, the kernel used instead, words of the reason)
BROKEN = {
    "mha_fwd:top_left": (lambda: attend_chunk(), "SDPA", "wrong by"),
    "mha_fwd:window": (lambda: attend(window=3), "SDPA", "wrong by"),
    "mha_fwd:no_lse": (lambda: attend(sinks=True), "softmax", "wrong by"),
    "mha_fwd:unwritten": (decode, "SDPA, masked", "wrong by"),
    "mha_varlen_fwd:uncapped": (softcapped, "softmax", "wrong by"),
    "fmha_v3_fwd:top_left": (lambda: attend_chunk(head_dim=128), "mha_fwd", "wrong by"),
    "mha_fwd:nan": (attend, "SDPA", "not finite"),
    "mha_fwd:raise": (attend, "SDPA", "it raised RuntimeError: hipErrorLaunchFailure"),
    "mha_fwd:build": (attend, "SDPA", "it raised SystemExit: [aiter] build failed"),
    "mha_fwd:crash": (attend, "SDPA", "the process that checked it was killed by signal 11"),
    "rmsnorm2d_fwd:nan": (norm, "F.rms_norm", "not finite"),
    "silu_and_mul:raise": (activation, "F.silu/F.gelu", "it raised RuntimeError"),
}


def attend_chunk(head_dim=16):
    query, key = torch.randn(1, 4, 20, head_dim, dtype=BF16), torch.randn(1, 2, 29, head_dim, dtype=BF16)
    with torch.no_grad(), ops.recording() as routes:
        ops.attention(query, key, key, scale=0.25, causal=True)
    return routes[0]


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_found_and_the_next_one_is_used(fault, break_kernel):
    call, instead, words = BROKEN[fault]
    break_kernel(fault)
    with pytest.warns(RuntimeWarning, match="in this process") as caught:
        route = call()
    assert route.name == instead
    assert len(caught) == 1 and words in str(caught[0].message)
    choices = registry.operations()[route.operation].choices.values()
    assert any(words in refusal.reason for choice in choices for refusal in choice.refusals)


@pytest.fixture
def newest(recorded_as, monkeypatch):
    """Simulate release 0.1.20.post1 from its recorded declarations, and run its checks in this process."""
    recorded_as("0.1.20.post1")

    def check_here(question, timeout):
        kind = probe_worker.decode(question["kind"])
        return probe_cases.check(question["operation"], question["tier"], question["name"], kind)

    monkeypatch.setattr(probe_worker, "send", check_here)


def test_a_dropped_sink_is_found(newest, monkeypatch):
    compute = recorded.COMPUTE["mha_fwd"]
    assert attend(sinks=True).name == "mha_fwd"
    monkeypatch.setitem(recorded.COMPUTE, "mha_fwd", lambda version, a: compute(version, {**a, "sink_ptr": None}))
    probe.forget()
    # No result is cached.
    monkeypatch.setenv("HF_ROCM_CACHE", "/dev/null")
    registry.forget_choices()
    with pytest.warns(RuntimeWarning, match="attention won't use aiter's mha_fwd for .* in this process: .*wrong by"):
        assert attend(sinks=True).name == "mha_fwd, sinks by lse"


def test_a_weight_read_in_the_wrong_order_is_found(newest, monkeypatch):
    def shuffled():
        with torch.no_grad(), ops.recording() as routes:
            ops.shuffled_linear(torch.randn(2, 32, dtype=BF16), ops.shuffle(torch.randn(16, 32, dtype=BF16)))
        return routes[0]

    assert shuffled().name == "gemm_a16w16, shuffled"
    # simulate a release that ignores the attribute `is_shuffled`
    monkeypatch.setattr(recorded, "READS_SHUFFLED", Version("9"))
    probe.forget()
    monkeypatch.setenv("HF_ROCM_CACHE", "/dev/null")
    registry.forget_choices()
    with pytest.warns(RuntimeWarning, match="wrong by"):
        assert shuffled().name == "unshuffle, F.linear"


def test_a_hanging_build_is_killed(monkeypatch, break_kernel):
    # This starts the child process.
    assert attend(window=3).name == "mha_fwd"
    break_kernel("mha_fwd:hang")
    messages = []
    monkeypatch.setattr(probe_worker, "FIRST_MESSAGE", 0.5)
    with (
        options.override(probe_timeout=3.0),
        probe_worker.progress(messages.append),
        pytest.warns(RuntimeWarning, match="was not built and checked within 3 s"),
    ):
        assert attend().name == "SDPA"
    assert "building and checking aiter's mha_fwd" in messages[0]
    assert probe_worker._worker is None


def test_a_pass_is_cached_and_a_failure_is_not(monkeypatch, tmp_path, break_kernel):
    requests = []
    send = probe_worker.send
    monkeypatch.setattr(
        probe_worker, "send", lambda question, timeout: requests.append(question) or send(question, timeout)
    )

    assert (attend().name, len(requests)) == ("mha_fwd", 1)
    (file,) = (tmp_path / "cache" / "probes").iterdir()
    facts = json.loads(file.read_text())
    assert facts["arch"] == "gfx942" and facts["version"] == "0.1.7.post2.dev18" and facts["torch"] == torch.__version__

    # simulate another process, which has only the cache on disk
    probe.forget()
    registry.forget_choices()
    assert (attend().name, len(requests)) == ("mha_fwd", 1)
    probe.forget()
    with options.override(refresh=True):
        assert (attend().name, len(requests)) == ("mha_fwd", 2)

    # another kind of call: checked again, with a kernel that is now broken
    break_kernel("mha_fwd:nan")
    with pytest.warns(RuntimeWarning):
        assert attend(window=3).name == "SDPA"
    assert len(requests) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The kernel is disabled in this process, without a second warning.
        assert attend().name == "SDPA"
    assert len(requests) == 3
    assert len(list((tmp_path / "cache" / "probes").iterdir())) == 1


def test_an_unwritable_cache_is_not_an_error(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path / "file"))
    assert attend().name == "mha_fwd"


def test_a_child_that_was_killed_is_replaced():
    assert attend().name == "mha_fwd"
    probe_worker._worker.process.kill()
    probe_worker._worker.process.wait()
    assert attend(window=3).name == "mha_fwd"


def test_a_check_passes_during_tracing():
    torch._dynamo.reset()
    weight = torch.randn(8, 24, dtype=BF16)

    def project(x):
        return ops.linear(ops.act_and_mul(x, activation="gelu"), weight)

    x = torch.randn(3, 48, dtype=BF16)
    with torch.no_grad(), options.override(tier="aiter"):
        torch.testing.assert_close(torch.compile(project, fullgraph=True, backend="aot_eager")(x), project(x))


def test_a_check_passes_in_inference_mode():
    with torch.inference_mode():
        assert attend(head_dim=24).name == "mha_fwd"


def test_without_probes_nothing_is_started():
    probe_worker.stop()
    with options.override(probe=False):
        assert attend().name == "mha_fwd"
    assert probe_worker._worker is None


def test_after_a_passed_check_an_exception_is_an_error(break_kernel):
    assert attend().name == "mha_fwd"
    break_kernel("mha_fwd:raise")
    with pytest.raises(RuntimeError, match="hipErrorLaunchFailure"):
        attend()


def test_the_random_state_is_unchanged():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    spec = AttentionSpec(
        dtype=BF16,
        device=CPU,
        heads=4,
        kv_heads=2,
        head_dim=16,
        value_dim=16,
        one_query=False,
        square=True,
        more_queries=False,
        causal=True,
        window=None,
        softcap=False,
        sinks=False,
        mask=None,
        grad=False,
        weights=False,
    )
    assert probe_cases.check("attention", "aiter", "mha_fwd", spec) is None
    assert torch.equal(torch.rand(3), expected)


def test_a_specification_is_transmitted_to_the_child():
    spec = (BF16, CPU, 4, None, True, 1.5, "silu")
    assert probe_worker.decode(json.loads(json.dumps(probe_worker.encode(spec)))) == spec


def test_linear_is_checked_too():
    assert linear().name == "gemm_a16w16"
