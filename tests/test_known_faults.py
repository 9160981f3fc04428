"""The GPUs and ROCm releases that are known to replay graphs incorrectly, and the ROCm release of a torch build."""

from __future__ import annotations

import pytest

from hf_rocm.architectures import KNOWN
from hf_rocm.known_faults import GRAPH_FAULTS, graph_faults, rocm_release


@pytest.mark.parametrize(
    ("gfx", "rocm", "names"),
    [
        ("gfx942", "7.1.1", []),
        ("gfx942", "7.2.0", ["garbage-in-some-processes"]),
        ("gfx942", "7.2.3", ["garbage-in-some-processes"]),
        ("gfx942", "7.2.4", []),
        ("gfx942", "7.2", ["garbage-in-some-processes"]),
        ("gfx942", "7.13", []),
        ("gfx942", "7.13.0", []),
        ("gfx942", "10.0.0", []),
        ("gfx942", None, ["garbage-in-some-processes"]),
        ("gfx950", "7.2.3", []),
        ("gfx950", "7.2.4", ["stale-input"]),
        ("gfx950", "7.2", ["stale-input"]),
        ("gfx950", "7.1", []),
        ("gfx1201", "6.4.4", ["stale-pointers"]),
        ("gfx1201", "10.1", ["stale-pointers"]),
        ("gfx1100", "7.2.0", []),
        (None, "7.2.0", []),
    ],
)
def test_faults_depend_on_the_gpu_and_the_release(gfx: str | None, rocm: str | None, names: list[str]) -> None:
    assert [fault.name for fault in graph_faults(gfx, rocm)] == names


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        # The third number is HIP's build number.
        ({"torch": "2.9.0", "hip": "7.2.26015-4179531dcd"}, "7.2"),
        ({"rocm": "7.2.3", "torch": "2.10.0+rocm7.2", "hip": "7.2.26015"}, "7.2.3"),
        ({"torch": "2.10.0+rocm7.2.4.git1a2b3c4d", "hip": "7.2.53211-e1a6bc5663"}, "7.2.4"),
        ({"torch": "2.11.0+rocm7.2", "hip": "7.2.26015-4179531dcd"}, "7.2"),
        # HIP has its own version numbers.
        ({"rocm": "10.1.0", "torch": "2.14.0+rocm10.1", "hip": "7.16.0"}, "10.1.0"),
        ({"rocm": "10.1", "torch": "2.14.0", "hip": "7.16.2"}, "10.1"),
        ({"torch": "2.9.0a0+git1a2b3c4"}, None),
        ({"torch": "2.9.0+cu128"}, None),
        ({"hip": "unknown"}, None),
        ({}, None),
    ],
)
def test_the_rocm_release_is_read_from_the_build(build: dict[str, str], expected: str | None) -> None:
    assert rocm_release(**build) == expected


def test_every_fault_has_a_source_and_known_architectures() -> None:
    names = [fault.name for fault in GRAPH_FAULTS]
    assert len(set(names)) == len(names)
    for fault in GRAPH_FAULTS:
        assert fault.link.startswith("https://github.com/ROCm/"), fault
        assert fault.gfx and set(fault.gfx) <= KNOWN.keys(), fault
        assert not fault.what.endswith("."), fault


def test_affected_releases_are_described() -> None:
    words = {fault.name: fault.releases for fault in GRAPH_FAULTS}
    assert words == {
        "garbage-in-some-processes": "ROCm 7.2.0 to 7.2.3",
        "stale-input": "ROCm 7.2.4",
        "stale-pointers": "every ROCm release so far",
    }
