"""The environment variables of a rank: whether all of them are set, its GPU exists, and other ranks can reach it."""

from __future__ import annotations

from collections.abc import Iterator

from hf_rocm.tools.doctor.checks.driver import VISIBLE
from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.report import Finding, ok, problem, warning

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
# Prefixes of network interfaces that other machines can't reach.
LOCAL_INTERFACES = ("lo", "docker")


def ranks(facts: Facts) -> Iterator[Finding]:
    """Yield findings on the variables for network interfaces and, if one of `NEEDED` is set, on the rank's variables.

    The variables for network interfaces are checked only on Linux.
    """
    present = [name for name in NEEDED if facts.set(name)]
    if facts.system.name == "Linux":
        yield from _interfaces(facts)
    if not present:
        return
    missing = [name for name in NEEDED if name not in present]
    not_numbers = [
        f"{name}={facts.set(name)}" for name in NUMBERS if facts.set(name) and not facts.set(name).isdecimal()
    ]
    if missing:
        yield warning(
            "several",
            f"{', '.join(present)} set, but not {', '.join(missing)}",
            means="torch.distributed treats this process as one of several, and fails or waits for the others",
            fix=f"start it with torchrun, which sets all of them; otherwise unset {' '.join(present)}",
        )
    elif not_numbers:
        yield _invalid(", ".join(not_numbers) + ": not a number")
    elif int(facts.set("RANK")) >= int(facts.set("WORLD_SIZE")):
        yield _invalid(f"RANK={facts.set('RANK')} with WORLD_SIZE={facts.set('WORLD_SIZE')}: ranks are numbered from 0")
    else:
        yield ok("several", ", ".join(f"{name} {facts.set(name)}" for name in NEEDED[:3]))
        yield from _several_hosts(facts)
    if not not_numbers:
        yield from _gpus(facts)


def _invalid(message: str) -> Finding:
    return problem(
        "several",
        message,
        means="torch.distributed cannot start",
        fix="start it with torchrun, which numbers the ranks",
    )


def _gpus(facts: Facts) -> Iterator[Finding]:
    """Check that there is a GPU for every local rank: a rank uses the GPU whose index is its local rank."""
    count = len(facts.devices)
    if not count:
        return
    hidden = [f"{name}={facts.environment[name]}" for name in VISIBLE if name in facts.environment]
    visible = f"{count} GPU{'s' * (count != 1)}" + (f" ({', '.join(hidden)})" if hidden else "")
    local, local_world = facts.set("LOCAL_RANK"), facts.set("LOCAL_WORLD_SIZE")
    if local_world.isdecimal() and int(local_world) > count:
        yield problem(
            "several",
            f"{local_world} ranks on this machine, but each sees only {visible}",
            means="several ranks would use the same GPU, which RCCL refuses (Duplicate GPU detected)",
            fix=f"torchrun --nproc-per-node {count} …" + (f", or unset {_names(hidden)}" if hidden else ""),
        )
    elif local.isdecimal() and int(local) >= count:
        yield problem(
            "several",
            f"LOCAL_RANK={local}, but this process sees only {visible}",
            means="the rank uses the GPU with its number, which does not exist (invalid device ordinal)",
            fix=f"unset {_names(hidden)}; or, if a scheduler shows each rank only one GPU: export LOCAL_RANK=0"
            if hidden
            else f"torchrun --nproc-per-node {count} …",
        )


def _names(settings: list[str]) -> str:
    return " ".join(setting.split("=")[0] for setting in settings)


def _interfaces(facts: Facts) -> Iterator[Finding]:
    """Check for variables that name a missing network interface, which makes gloo or RCCL fail."""
    interfaces = facts.host.interfaces
    if not interfaces:
        return
    wrong = []
    named = facts.set("GLOO_SOCKET_IFNAME")
    wrong += [f"GLOO_SOCKET_IFNAME={named}" for part in named.split(",") if part and part not in interfaces][:1]
    wanted = facts.set("NCCL_SOCKET_IFNAME")
    if wanted and not wanted.startswith("^") and not any(_matches(part, wanted) for part in interfaces):
        wrong.append(f"NCCL_SOCKET_IFNAME={wanted}")
    if wrong:
        yield problem(
            "several",
            f"{', '.join(wrong)}: no such network interface here",
            means="ranks cannot reach each other, so they fail to start",
            fix=f"use one of {', '.join(interfaces)}, or unset {_names(wrong)}",
        )


def _matches(interface: str, wanted: str) -> bool:
    """Return whether an interface matches a list as in RCCL: by a prefix or, after a leading `=`, by its whole name."""
    if wanted.startswith("="):
        return interface in wanted[1:].split(",")
    return any(part and interface.startswith(part) for part in wanted.split(","))


def _several_hosts(facts: Facts) -> Iterator[Finding]:
    """If ranks run on several hosts, check that the host name resolves to an address of this host.

    If it does not resolve, gloo uses the loopback address, unless GLOO_SOCKET_IFNAME is set.
    """
    local, world = facts.set("LOCAL_WORLD_SIZE"), facts.set("WORLD_SIZE")
    several = local.isdecimal() and int(local) < int(world)
    if facts.host.resolves is False and several and not facts.set("GLOO_SOCKET_IFNAME"):
        outward = [interface for interface in facts.host.interfaces if not interface.startswith(LOCAL_INTERFACES)]
        yield warning(
            "several",
            "this machine's host name does not resolve to one of its addresses",
            means="gloo uses the loopback address instead, which ranks on other machines cannot reach",
            fix=f"export GLOO_SOCKET_IFNAME={outward[0] if outward else 'the interface that connects them'}, "
            "on every machine, or add the name to /etc/hosts",
        )
