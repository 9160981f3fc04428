"""`hf_rocm.check()`: check that the overlays are installed and match, and that every rank would run the same files.

It takes a fraction of a second and imports neither torch nor transformers. Call it at the start of every rank, before a
model is built. A node with different files then stops the job with an error instead of computing slightly different
numbers.
"""

from __future__ import annotations

import hashlib
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_rocm import __version__
from hf_rocm.arguments import require_families
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
    """Raise `OverlayError` unless the overlays of these models are installed and match their files.

    models: names of model folders such as `llama`; all if none is given. strict: accept only files that were verified
    as a whole. expected: the fingerprint that `check` returned in another process. across_ranks: compare with the other
    ranks of torch.distributed, in a collective that every rank must call; by default, if a process group is
    initialised. The error names the rank and the host that differ.
    Returns the fingerprint of the installation, which is equal only for the same hf-rocm, transformers and files.
    """
    distributed = _process_group(across_ranks)
    error: HfRocmError | None = None
    fingerprint = ""
    try:
        require_families(models, "check")
        fingerprint = _fingerprint(models, strict=strict, transformers_path=transformers_path)
        if expected is not None and fingerprint != expected:
            here = f"in this process (host {socket.gethostname()})"
            raise _difference("in the process that computed `expected`", expected, here, fingerprint)
    except HfRocmError as caught:
        # The other ranks wait in the collective: send them the error, then raise it.
        error = caught
    if distributed is not None:
        _compare(distributed, fingerprint, error)
    if error is not None:
        raise error
    return fingerprint


def _fingerprint(models: Sequence[str], *, strict: bool, transformers_path: Path | str | None) -> str:
    installation, states, _ = status(models, transformers_path=transformers_path)
    if not states:
        raise OverlayError(
            f"there is no overlay for transformers {installation.version}, and none is installed",
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
        own = {
            Installed.NO: "the stock file",
            Installed.OLD: f"a block of hf-rocm {state.written.version if state.written else '(unknown)'}",
            Installed.FOREIGN: state.detail,
            Installed.EDITED: state.detail,
        }[state.installed]
        edited = state.installed is Installed.EDITED
        raise OverlayError(
            f"the installed file of {state.model} is not the one that hf-rocm {__version__} installs",
            facts={**facts, "expected": "the stock file and this release's block", "found": own},
            hint=state.reinstall() if edited else "run `hf-rocm install-overlays` on this node",
        )
    if strict and state.match is not Match.VERIFIED:
        assert state.match in GOOD
        raise OverlayError(
            f"{state.file.name} was not verified as a whole",
            facts={**facts, "expected": "a file of a verified release", "found": state.detail},
            hint="omit strict, or upgrade hf-rocm",
        )


def _process_group(across_ranks: bool | None) -> object | None:
    """Return torch.distributed if the ranks should be compared, else None. Looks it up and never imports it."""
    if across_ranks is False:
        return None
    distributed = sys.modules.get("torch.distributed")
    running = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if across_ranks and not running:
        raise OverlayError(
            "there are no ranks to compare with",
            facts={"expected": "an initialised torch.distributed process group", "found": "none in this process"},
            hint="call torch.distributed.init_process_group first, or omit across_ranks",
        )
    return distributed if running else None


def _compare(distributed: object, fingerprint: str, error: HfRocmError | None) -> None:
    own = (socket.gethostname(), fingerprint, error)
    results: list[tuple[str, str, HfRocmError | None]] = [own] * distributed.get_world_size()  # type: ignore[attr-defined]
    distributed.all_gather_object(results, own)  # type: ignore[attr-defined]
    if error is not None:
        # This rank raises its own error.
        return
    for rank, (host, _, failed) in enumerate(results):
        if failed is not None:
            raise OverlayError(
                f"rank {rank} (host {host}) failed its check: {failed.message}", facts=failed.facts, hint=failed.hint
            )
    first_host, first, _ = results[0]
    for rank, (host, other, _) in enumerate(results):
        if other != first:
            raise _difference(f"on rank 0 (host {first_host})", first, f"on rank {rank} (host {host})", other)


def _difference(one: str, expected: str, other: str, actual: str) -> OverlayError:
    return OverlayError(
        "the processes of this job do not run the same files",
        facts={"expected": f"{expected}, as {one}", "found": f"{actual}, {other}"},
        hint="install the same transformers and hf-rocm on every node, run `hf-rocm install-overlays` there, and "
        "compare `python -m hf_rocm.check_version --json`",
    )
