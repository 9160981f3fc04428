"""`hf_rocm.check()`: is what every rank would run the same, and is it what was verified?

Tens of milliseconds, and it imports neither torch nor transformers: call it at the start of each rank, before a
model is built. A node with another content then stops the job with the fix, not with numbers that are a little off.
"""

from __future__ import annotations

import hashlib
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_rocm import __version__
from hf_rocm.errors import HfRocmError, OverlayError
from hf_rocm.overlay.block import sha256
from hf_rocm.overlay.commands import status
from hf_rocm.overlay.state import GOOD, FileState, Installed, Match


def check(
    *models: str,
    strict: bool = False,
    expected: str | None = None,
    across_ranks: bool | None = None,
    transformers_path: Path | str | None = None,
) -> str:
    """Raise `OverlayError` unless the overlays of these models (none named: all) are installed and match.

    strict: only files that were verified whole will do. expected: the fingerprint that another process got from
    `check`. across_ranks: compare with the other ranks of torch.distributed, in one collective that every rank must
    call; by default where a process group is initialised. The error says which rank, on which host, differs.
    Returns the fingerprint of what is installed: equal only for the same hf-rocm, transformers and files.
    """
    error: HfRocmError | None = None
    fingerprint = ""
    try:
        fingerprint = _fingerprint(models, strict=strict, transformers_path=transformers_path)
        if expected is not None and fingerprint != expected:
            raise _other("the process that was asked before", expected, f"here, on {socket.gethostname()}", fingerprint)
    except HfRocmError as found:
        error = found  # the others wait in the collective: tell them, then raise
    distributed = _process_group(across_ranks)
    if distributed is not None:
        _compare(distributed, fingerprint, error)
    if error is not None:
        raise error
    return fingerprint


def _fingerprint(models: Sequence[str], *, strict: bool, transformers_path: Path | str | None) -> str:
    installation, states, _ = status(models, transformers_path=transformers_path)
    if not states:
        raise OverlayError(
            f"no overlay is made for transformers {installation.version}, and none is installed",
            facts={"path": installation.root, "found": installation.version},
            hint="upgrade hf-rocm, or install a release of transformers that it covers",
        )
    for state in states:
        _require(state, strict=strict)
    parts = [__version__, installation.version, *(f"{state.model}={sha256(state.data or b'')}" for state in states)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _require(state: FileState, *, strict: bool) -> None:
    mismatch = state.mismatch()
    if mismatch is not None:
        raise mismatch
    facts = {"file": state.file, "host": socket.gethostname()}
    if state.installed is not Installed.YES:
        found = {
            Installed.NO: "the stock file",
            Installed.OLD: f"a block of hf-rocm {state.written.version if state.written else '(unknown)'}",
            Installed.EDITED: state.detail,
        }[state.installed]
        edited = state.installed is Installed.EDITED
        raise OverlayError(
            f"the overlay of {state.model} is not installed as hf-rocm {__version__} has it",
            facts={**facts, "expected": "the stock file and this release's block", "found": found},
            hint=state.reinstall() if edited else "run `hf-rocm install-overlays` on this node",
        )
    if strict and state.match is not Match.VERIFIED:
        assert state.match in GOOD
        raise OverlayError(
            f"{state.file.name} was not verified whole",
            facts={**facts, "expected": "a file of a release that was checked", "found": state.detail},
            hint="leave strict out, or upgrade hf-rocm",
        )


def _process_group(across_ranks: bool | None) -> object | None:
    """torch.distributed if the ranks should be compared; looked up, never imported."""
    if across_ranks is False:
        return None
    distributed = sys.modules.get("torch.distributed")
    running = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if across_ranks and not running:
        raise OverlayError(
            "there are no ranks to compare with",
            facts={"expected": "an initialised torch.distributed process group", "found": "none in this process"},
            hint="call torch.distributed.init_process_group first, or leave across_ranks out",
        )
    return distributed if running else None


def _compare(distributed: object, fingerprint: str, error: HfRocmError | None) -> None:
    mine = (socket.gethostname(), fingerprint, error)
    everyone: list[tuple[str, str, HfRocmError | None]] = [mine] * distributed.get_world_size()  # type: ignore[attr-defined]
    distributed.all_gather_object(everyone, mine)  # type: ignore[attr-defined]
    if error is not None:
        return  # our own error says more
    for rank, (host, _, failed) in enumerate(everyone):
        if failed is not None:
            raise OverlayError(
                f"rank {rank} on {host} failed its check: {failed.message}", facts=failed.facts, hint=failed.hint
            )
    first_host, first, _ = everyone[0]
    for rank, (host, other, _) in enumerate(everyone):
        if other != first:
            raise _other(f"rank 0 on {first_host}", first, f"rank {rank} on {host}", other)


def _other(one: str, expected: str, other: str, found: str) -> OverlayError:
    return OverlayError(
        "the processes of this job don't run the same files",
        facts={"expected": f"{expected}, as in {one}", "found": f"{found}, in {other}"},
        hint="install the same transformers and hf-rocm on every node, run `hf-rocm install-overlays` there, and "
        "compare `python -m hf_rocm.check_version --json`",
    )
