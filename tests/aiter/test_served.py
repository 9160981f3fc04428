"""The releases of aiter, the GPUs and the calls that the tier serves, and the devices and releases that it refuses."""

from __future__ import annotations

import dataclasses

import pytest
from packaging.version import Version

from hf_rocm import options
from hf_rocm.architectures import NEWEST_AITER
from hf_rocm.device import Device
from hf_rocm.ops.aiter import activation, contract, decode, detect, linear, norm, rope, triton
from hf_rocm.ops.aiter.detect import Argument, Function, Release
from tests.aiter import recorded
from tests.aiter.specifications import (
    ACTIVATION,
    ASSEMBLY,
    ATTENTION,
    DECODE,
    DECODING,
    DENSE,
    FLASH,
    LINEAR,
    LSE,
    MHA,
    NEWEST,
    NORM,
    PACKED,
    ROPE,
    VARLEN,
)


@pytest.mark.parametrize(
    ("refuses", "spec"),
    [
        (MHA, ATTENTION),
        (MHA, ATTENTION._replace(sinks=True)),
        (MHA, ATTENTION._replace(**DECODE)),
        (MHA, ATTENTION._replace(more_queries=True, square=False, causal=False)),
        (LSE, ATTENTION._replace(sinks=True, **DECODE)),
        (FLASH, ATTENTION._replace(**ASSEMBLY)),
        (FLASH, ATTENTION._replace(grad=True, window=4)),
        (DENSE, ATTENTION._replace(softcap=True, **ASSEMBLY)),
        (PACKED, VARLEN),
        (decode.refuses, DECODING),
        (decode.refuses, DECODING._replace(sinks=True)),
        (linear.refuses, LINEAR),
        (linear.shuffled_refuses, LINEAR),
        (activation.refuses, ACTIVATION),
        (norm.refuses, NORM),
        (norm.refuses, NORM._replace(one_plus=True)),
        (norm.add_refuses, NORM._replace(one_plus=True)),
        (rope.refuses, ROPE),
    ],
)
def test_the_newest_release_serves(recorded_as, refuses, spec):
    recorded_as(NEWEST)
    assert refuses(spec, Device("cuda", rocm=True, arch="gfx942")) is None


COMPILED = [MHA, LSE, FLASH, DENSE, PACKED, decode.refuses, linear.refuses, linear.shuffled_refuses]
PORTABLE = [activation.refuses, norm.refuses, norm.add_refuses, rope.refuses, triton.refuses]


@pytest.mark.parametrize("refuses", COMPILED + PORTABLE)
@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        (Device("cpu", rocm=False), "aiter needs an AMD GPU under ROCm, but this is the CPU"),
        (Device("cuda", rocm=False), "aiter needs an AMD GPU under ROCm, but this is a cuda device without ROCm"),
    ],
)
def test_unsupported_devices_are_refused(recorded_as, refuses, device, sentence):
    recorded_as(NEWEST)
    assert refuses(None, device) == sentence


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1030", "gfx1250"])
@pytest.mark.parametrize("refuses", COMPILED)
def test_compiled_kernels_are_for_instinct(recorded_as, refuses, arch):
    recorded_as(NEWEST)
    sentence = f"this kernel of aiter is for gfx90a, gfx942, gfx950, not for {arch}"
    assert refuses(None, Device("cuda", rocm=True, arch=arch)) == sentence


@pytest.mark.parametrize("refuses", PORTABLE)
def test_portable_kernels_are_for_listed_radeons_too(recorded_as, refuses):
    recorded_as("0.1.18")
    sentence = "aiter supports gfx1151 from 0.1.19 on, but this is amd-aiter 0.1.18"
    assert refuses(None, Device("cuda", rocm=True, arch="gfx1151")) == sentence
    sentence = "this kernel of aiter is for gfx90a, gfx942, gfx950, gfx1100, gfx1151, gfx1201, not for gfx1030"
    assert refuses(None, Device("cuda", rocm=True, arch="gfx1030")) == sentence


@pytest.mark.parametrize(
    ("refuses", "spec"),
    [
        (activation.refuses, ACTIVATION),
        (norm.refuses, NORM),
        (norm.add_refuses, NORM),
        (rope.refuses, ROPE),
        (triton.refuses, ATTENTION),
        (triton.refuses, ATTENTION._replace(window=4, sinks=True)),
        (triton.refuses, ATTENTION._replace(head_dim=256, value_dim=256)),
    ],
)
def test_the_newest_release_serves_radeon(recorded_as, refuses, spec):
    recorded_as(NEWEST, "gfx1201")
    assert refuses(spec, Device("cuda", rocm=True, arch="gfx1201")) is None


def test_attention_gradients_are_served_on_the_radeon_that_supports_them(recorded_as):
    recorded_as(NEWEST, "gfx1151")
    assert triton.refuses(ATTENTION._replace(grad=True), Device("cuda", rocm=True, arch="gfx1151")) is None


@pytest.mark.parametrize(
    ("release", "newer"),
    [
        ("0.1.7.post2.dev18", False),
        ("0.1.20.post1+rocm7.2", False),
        (f"{NEWEST}+ge4048607a5", False),
        ("0.1.21", True),
        ("0.1.22+rocm7.2", True),
        (None, False),
    ],
)
def test_an_unchecked_release_is_used_if_aiter_is_requested(recorded_as, monkeypatch, release, newer):
    assert recorded.RELEASES[-1] == NEWEST_AITER == NEWEST
    recorded_as(NEWEST)
    unchecked = dataclasses.replace(recorded.release(NEWEST), version=Version(release) if release else None)
    monkeypatch.setattr(detect, "load", lambda: unchecked)
    device = Device("cuda", rocm=True, arch="gfx942")
    sentence = f"amd-aiter {release} is newer than {NEWEST}, the last release that hf_rocm's calls were checked with "
    assert (detect.unavailable(device) or "").startswith(sentence) is newer
    with options.override(tier="aiter"):
        assert detect.unavailable(device) is None
    with options.override(aiter={**options.current().aiter, "gemm": options.Switch.REQUIRED}):
        assert detect.unavailable(device) is None


def test_decode_without_cumulative_lengths_uses_hf_rocms_decode_kernel(recorded_as, monkeypatch):
    recorded_as(NEWEST)
    device = Device("cuda", rocm=True, arch="gfx942")
    monkeypatch.setattr(decode.split, "refuses", lambda spec, device: None)
    assert "splits the keys" in decode.refuses(DECODING, device)
    assert decode.refuses(DECODING._replace(ends=True), device) is None
    with options.override(tier="aiter"):
        assert decode.refuses(DECODING, device) is None
    with options.override(aiter={**options.current().aiter, "attention": options.Switch.REQUIRED}):
        assert decode.refuses(DECODING, device) is None


def test_a_release_with_an_unknown_required_argument_is_refused(monkeypatch):
    """If a future release inserts a required argument, the call is refused."""
    arguments = (Argument("A", True), Argument("B", True), Argument("swizzle", True), Argument("bias", False))
    arguments += (Argument("otype", False),)
    release = Release(None, lambda name: Function(print, arguments), lambda name: None)
    monkeypatch.setattr(detect, "load", lambda: release)
    sentence = "gemm_a16w16 of this amd-aiter requires `swizzle`, which hf_rocm doesn't support"
    assert linear.refuses(LINEAR, Device("cuda", rocm=True, arch="gfx942")) == sentence


def test_neutral_values_are_passed_only_if_required(monkeypatch):
    given = []

    def kernel(**keywords):
        given.append(keywords)

    arguments = (Argument("a", True), Argument("size", True), Argument("spare", False))
    monkeypatch.setattr(
        detect, "load", lambda: Release(None, lambda name: Function(kernel, arguments), lambda name: None)
    )
    call = contract.operator("any", frozenset("a"), {"size": 0, "spare": 1, "gone": 2})
    call(a=5)
    assert given == [{"a": 5, "size": 0}]
