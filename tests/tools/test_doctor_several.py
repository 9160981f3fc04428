"""Doctor with several GPUs: environment variables of ranks, settings that slow down RCCL, its release, peer access."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hf_rocm.tools.doctor.checks.ranks import ranks
from hf_rocm.tools.doctor.checks.several import several
from hf_rocm.tools.doctor.collect import collect
from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.machine import ThisMachine
from tests.tools.recorded import Recorded


@pytest.fixture(scope="module")
def good() -> Facts:
    return collect(Recorded("mi300x"))


def with_environment(facts: Facts, **variables: str) -> Facts:
    return replace(facts, environment={**facts.environment, **variables})


def levels(findings) -> list[str]:
    return [finding.level.value for finding in findings]


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def with_host(facts: Facts, **changes: object) -> Facts:
    return replace(facts, host=replace(facts.host, **changes))


def test_variables_of_torchrun_are_fine(good: Facts) -> None:
    findings = list(several(with_environment(good, **TORCHRUN, LOCAL_WORLD_SIZE="2")))
    assert levels(findings) == ["ok", "ok"] and findings[0].what == "RANK 1, WORLD_SIZE 2, LOCAL_RANK 1"
    assert list(ranks(good)) == []


@pytest.mark.parametrize(
    ("changes", "level", "words", "fix"),
    [
        (
            {"WORLD_SIZE": ""},
            "warning",
            "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT set, but not WORLD_SIZE",
            "torchrun",
        ),
        ({"RANK": "one"}, "problem", "RANK=one: not a number", "torchrun"),
        ({"RANK": "2"}, "problem", "RANK=2 with WORLD_SIZE=2", "torchrun"),
        ({"LOCAL_RANK": "2"}, "problem", "LOCAL_RANK=2, but this process sees only 2 GPUs", "--nproc-per-node 2"),
        (
            {"LOCAL_RANK": "2", "ROCR_VISIBLE_DEVICES": "0,1"},
            "problem",
            "sees only 2 GPUs (ROCR_VISIBLE_DEVICES=0,1)",
            "unset ROCR_VISIBLE_DEVICES; or, if a scheduler shows each rank only one GPU: export LOCAL_RANK=0",
        ),
        (
            {"LOCAL_WORLD_SIZE": "4"},
            "problem",
            "4 ranks on this machine, but each sees only 2 GPUs",
            "--nproc-per-node 2",
        ),
    ],
)
def test_inconsistent_rank_variables_are_reported(
    good: Facts, changes: dict[str, str], level: str, words: str, fix: str
) -> None:
    result = [
        finding for finding in ranks(with_environment(good, **{**TORCHRUN, **changes})) if finding.level.value != "ok"
    ]
    assert levels(result) == [level] and words in result[0].what and fix in result[0].fix and result[0].means


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("GLOO_SOCKET_IFNAME", "eno1", False),
        ("GLOO_SOCKET_IFNAME", "eno1,eno2", True),
        # Gloo accepts no prefixes.
        ("GLOO_SOCKET_IFNAME", "eno", True),
        ("NCCL_SOCKET_IFNAME", "en,ib", False),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", False),
        ("NCCL_SOCKET_IFNAME", "=eno", True),
        ("NCCL_SOCKET_IFNAME", "=eno1", False),
        ("NCCL_SOCKET_IFNAME", "ib", True),
    ],
)
def test_network_interfaces_that_do_not_exist_are_a_problem(good: Facts, name: str, value: str, wrong: bool) -> None:
    facts = with_environment(with_host(good, interfaces=("eno1", "lo")), **{name: value})
    assert levels(ranks(facts)) == ["problem"] * wrong


def test_an_unresolved_host_name_matters_only_on_several_machines(good: Facts) -> None:
    unresolved = with_host(good, resolves=False, interfaces=("lo", "eno1"))
    one_node = with_environment(unresolved, **TORCHRUN, LOCAL_WORLD_SIZE="2")
    assert levels(ranks(one_node)) == ["ok"]
    two_nodes = {**TORCHRUN, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    findings = list(ranks(with_environment(unresolved, **two_nodes)))
    assert levels(findings) == ["ok", "warning"] and "GLOO_SOCKET_IFNAME=eno1" in findings[1].fix
    assert levels(ranks(with_environment(unresolved, **two_nodes, GLOO_SOCKET_IFNAME="eno1"))) == ["ok"]
    assert levels(ranks(with_environment(with_host(good, resolves=True), **two_nodes))) == ["ok"]


def test_settings_that_slow_down_rccl_are_reported(good: Facts) -> None:
    assert levels(several(good)) == ["ok"]
    for changes in ({"numa_balancing": True}, {"iommu": ""}, {"iommu": "soft"}):
        assert levels(several(with_host(good, **changes))) == ["ok", "warning"], changes
    assert levels(several(with_host(good, iommu="force,pt"))) == ["ok"]
    # Without an RDMA network, no memory is locked.
    assert levels(several(with_host(good, locked=65536))) == ["ok"]
    assert levels(several(with_host(good, locked=65536, networks=("mlx5_0",)))) == ["ok", "warning"]
    assert levels(several(with_host(good, locked=None, networks=("mlx5_0",)))) == ["ok"]
    assert levels(several(with_environment(good, NCCL_SHM_DISABLE="0", NCCL_DEBUG="WARN"))) == ["ok"]
    shown = with_environment(good, NCCL_MIN_NCHANNELS="32", HSA_NO_SCRATCH_RECLAIM="1")
    assert "NCCL_MIN_NCHANNELS=32; HSA_NO_SCRATCH_RECLAIM=1" in next(several(shown)).what
    one = replace(good.torch_result, facts={**good.torch_result.facts, "peers": None})
    assert list(several(with_host(replace(good, torch_result=one), numa_balancing=True))) == []


@pytest.mark.parametrize(("loaded", "accepted"), [("2.27.3", True), ("2.22.3", False), ("nonsense", True)])
def test_rccl_of_another_rocm_release_is_reported(good: Facts, loaded: str, accepted: bool) -> None:
    facts = {**good.torch_result.facts, "collectives_loaded": {"path": "/opt/rocm/lib/librccl.so.1", "version": loaded}}
    result = levels(several(replace(good, torch_result=replace(good.torch_result, facts=facts))))
    assert result == (["ok"] if accepted else ["ok", "warning"])


def test_the_collectives_version_is_decoded_and_an_unloaded_library_is_none(tmp_path: Path) -> None:
    from hf_rocm.tools.doctor import child

    assert [child.version_of(code) for code in (22707, 21805)] == ["2.27.7", "2.18.5"]
    maps = tmp_path / "maps"
    assert child._loaded_collectives(maps) is None
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 1  /usr/lib/libc.so.6\n")
    assert child._loaded_collectives(maps) is None


def test_facts_of_the_host_are_read_from_files() -> None:
    host = collect(Recorded("rccl-misconfigured")).host
    assert (host.numa_balancing, host.iommu, host.locked, host.networks) == (True, "", 65536, ("mlx5_0",))
    machine = Recorded("mi300x")
    assert collect(machine).host.iommu == "pt"
    machine.data["files"]["/sys/devices/virtual/dmi/id/bios_version"] = "Hyper-V UEFI Release v4.1"
    assert collect(machine).host.iommu is None
    assert ThisMachine().resolves() in (True, False)


@pytest.mark.parametrize("reads", [(False, False), (True, False), (False, True)])
def test_gpus_without_peer_access_are_a_warning(good: Facts, reads: tuple[bool, bool]) -> None:
    """reads: whether GPU 0 can read the memory of GPU 1, and the other way round."""
    facts = {**good.torch_result.facts, "peers": [[True, reads[0]], [reads[1], True]], "collectives": None}
    without_peers = replace(
        good, torch_result=replace(good.torch_result, facts=facts), container="docker", shared_memory=64 * 2**20
    )
    findings = list(several(without_peers))
    assert levels(findings) == ["warning"] * 3
    assert "no RCCL" in findings[0].what and "(0-1)" in findings[1].what and "64 MiB" in findings[2].what
