"""The ledger: graph replays on this machine that differed from uncaptured runs, one line of JSON per event.

It is in the cache folder, so that `hf-rocm doctor` and `hf-rocm env` still report the events of processes that have
ended. Reading it imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hf_rocm import options

NAME = "graph_events.jsonl"

# The largest number of events that are returned; older ones are left out.
_MAX_EVENTS = 100

_log = logging.getLogger("hf_rocm")


@dataclass(frozen=True)
class Event:
    """One difference between a replay and the uncaptured step or forward.

    when: UTC, ISO 8601. gpu: name and architecture. rocm, driver: versions, or None. model: the class of the model.
    checkpoint: the name or path of its checkpoint. operators: the number of operators of an uncaptured run, roughly the
    number of kernels in the graph; 0 if unknown. replays: the number of replays up to the difference. unproven: the
    number of replays since the last verified one. reason: the difference.
    """

    when: str
    gpu: str
    rocm: str | None
    driver: str | None
    torch: str
    transformers: str
    hf_rocm: str
    model: str
    checkpoint: str
    operators: int
    replays: int
    unproven: int
    reason: str

    def command(self, *, force: bool = False) -> str:
        """Return a command that compares replays with uncaptured steps again, on the same model. It needs a GPU.

        force: for a GPU without ROCm.
        """
        name = shlex.quote(self.checkpoint or "MODEL")
        return f"HF_ROCM_GRAPHS=1 hf-rocm verify {name}{' --force' if force else ''}"

    def __str__(self) -> str:
        stack = (
            f"{self.gpu}, ROCm {self.rocm or 'unknown'}, driver {self.driver or 'unknown'}, torch {self.torch}, "
            f"transformers {self.transformers}"
        )
        size = f"{self.operators} operators, replay {self.replays}"
        return f"{self.when[:10]}: {self.model} on {stack} ({size}): {self.reason}"


def path() -> Path:
    """The path of the ledger."""
    return options.cache_folder() / NAME


def record(event: Event) -> None:
    """Append an event. If it can't be written, logs a warning and raises nothing."""
    try:
        path().parent.mkdir(parents=True, exist_ok=True)
        with path().open("a", encoding="utf-8") as file:
            # This is one write of less than a page, so that lines of concurrent processes don't interleave.
            file.write(json.dumps(asdict(event)) + "\n")
    except OSError as error:
        # `path` also raises this error if this user has no home folder.
        _log.warning("the event can't be written to %s: %s", NAME, error)


def events() -> tuple[Event, ...]:
    """The latest events on this machine, oldest first. Lines that can't be read are left out. Raises nothing."""
    try:
        lines = path().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    parsed = (_event(line) for line in lines[-_MAX_EVENTS:])
    return tuple(event for event in parsed if event is not None)


def _event(line: str) -> Event | None:
    names = {field.name for field in fields(Event)}
    try:
        values = json.loads(line)
        return Event(**{name: value for name, value in values.items() if name in names})
    except (ValueError, TypeError, AttributeError):
        # The line was written by another release, or is truncated.
        return None
