"""The handshake before a load: every rank publishes its facts, and all continue or all raise the same error.

It uses a store instead of a collective, because waiting on a store has a timeout and shows which ranks are missing. The
handshake takes milliseconds.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from hf_rocm.distributed.environment import Place, attempt
from hf_rocm.errors import HfRocmError, RankError

Facts = Mapping[str, str]

# Seconds between the first two polls of the store; the pause doubles, up to 16 times this value.
_PAUSE = 0.002
# Seconds for the other ranks to read an error before this rank, and perhaps the store, ends.
_GRACE = 5.0
# The largest number of differing facts that are listed; further ones are only counted.
_SHOWN = 6
_calls: dict[tuple[int, str], Iterator[int]] = {}


def agree(
    store: Any, here: Place, ranks: Sequence[int], find: Callable[[], Facts], *, timeout: float, hint: str
) -> None:
    """Compare the facts that `find` returns on each of `ranks`. Returns once all ranks have published equal facts.

    Raises the same `RankError` on every rank that joined: if facts differ, with the values and their ranks; if `find`
    raised on a rank, with that error's message; if a rank has not joined after `timeout` seconds, with its number. A
    rank that can't reach the store raises another `RankError`. hint: what to do about a difference.
    """
    call = _Call(store, here, ranks)
    record: dict[str, Any] = {"host": socket.gethostname()}
    failure: BaseException | None = None
    try:
        record["facts"] = dict(find())
    except Exception as error:  # noqa: BLE001 - the other ranks wait: publish the error first, then raise it
        failure = error
        record["failed"] = _description(error)
    try:
        if failure is not None:
            # This must precede publish(): a rank that has read the facts of all ranks continues.
            call.end(_failed(here.rank, record))
        call.publish(record)
        collected = call.collect(timeout)
    except RuntimeError as error:
        raise _store_lost(here, error) from (failure or error)
    decided = collected if isinstance(collected, RankError) else _compare(collected, hint)
    if decided is not None:
        call.wait_for_readers()
        raise decided from failure


class _Call:
    """One handshake. Its keys are numbered, since ranks may load several models."""

    def __init__(self, store: Any, here: Place, ranks: Sequence[int]) -> None:
        group = ",".join(map(str, ranks))
        number = next(_calls.setdefault((here.rank, group), count()))
        self.store, self.here, self.ranks = store, here, ranks
        self.prefix = f"hf_rocm/{attempt()}/{group}/{number}"

    def publish(self, facts: Mapping[str, Any]) -> None:
        self.store.set(self._key(self.here.rank), json.dumps(facts))

    def end(self, error: RankError | None) -> RankError | None:
        """End the handshake for all ranks with this result, unless another rank has ended it. Returns the result.

        error: None if the ranks continue.
        """
        result = "go on" if error is None else json.dumps(error.to_dict())
        return _error(self.store.compare_set(f"{self.prefix}/end", "", result))

    def collect(self, timeout: float) -> dict[int, dict[str, Any]] | RankError:
        """Return the facts of every rank, or the error with which a rank ended the handshake."""
        began, pause = time.monotonic(), _PAUSE
        ended, keys = f"{self.prefix}/end", [self._key(rank) for rank in self.ranks]
        while True:
            error = _error(self.store.get(ended)) if self.store.check([ended]) else None
            all_published = error is None and self.store.check(keys)
            waited = time.monotonic() - began
            if all_published:
                error = self.end(None)
                if error is None:
                    return {rank: json.loads(self.store.get(self._key(rank))) for rank in self.ranks}
            elif error is None and waited > timeout:
                missing = [rank for rank in self.ranks if not self.store.check([self._key(rank)])]
                error = self.end(_not_joined(missing, self.ranks, waited))
            if error is not None:
                return error
            time.sleep(min(pause, max(_PAUSE, timeout - waited)))
            pause = min(2 * pause, 16 * _PAUSE)

    def wait_for_readers(self) -> None:
        """Wait until the other ranks have read the error, with a time limit: the store may end with this process."""
        deadline = time.monotonic() + _GRACE
        try:
            self.store.set(f"{self.prefix}/read/{self.here.rank}", "")
            readers = [rank for rank in self.ranks if self.store.check([self._key(rank)])]
            while readers and time.monotonic() < deadline:
                readers = [rank for rank in readers if not self.store.check([f"{self.prefix}/read/{rank}"])]
                time.sleep(_PAUSE)
        except RuntimeError:
            # The store has ended, so no rank still waits on it.
            pass

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/{rank}"


def _compare(published: Mapping[int, Mapping[str, Any]], hint: str) -> RankError | None:
    hosts = {rank: record["host"] for rank, record in published.items()}
    names = list(dict.fromkeys(name for record in published.values() for name in record["facts"]))
    differing = {}
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, record in published.items():
            values.setdefault(record["facts"].get(name, "absent"), []).append(rank)
        if len(values) > 1:
            differing[name] = "; ".join(f"{value} on {named(ranks, hosts)}" for value, ranks in values.items())
    if not differing:
        return None
    shown = list(differing)[:_SHOWN]
    facts = {name: differing[name] for name in shown}
    if len(differing) > _SHOWN:
        facts["and"] = f"{len(differing) - _SHOWN} more"
    names_shown = f"{', '.join(shown)}{' and more' if len(differing) > _SHOWN else ''}"
    return RankError(f"the ranks would not run the same model; they differ in: {names_shown}", facts=facts, hint=hint)


def named(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Format ranks with their hosts: `ranks 0, 2–5 (node1, node2)`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    numbers = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    places = ", ".join(dict.fromkeys(hosts[rank] for rank in sorted(ranks) if rank in hosts))
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}" + (f" ({places})" if places else "")


def _description(error: BaseException) -> dict[str, Any]:
    if isinstance(error, HfRocmError):
        return error.to_dict()
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return {"message": text, "facts": {}, "hint": None}


def _failed(rank: int, published: Mapping[str, Any]) -> RankError:
    failed = published["failed"]
    return RankError(
        f"rank {rank} ({published['host']}) failed before the model was loaded: {failed['message']}",
        facts=failed["facts"],
        hint=failed["hint"] or f"see the log of rank {rank}",
    )


def _not_joined(missing: Sequence[int], ranks: Sequence[int], waited: float) -> RankError:
    return RankError(
        f"{named(missing, {})} did not join the other ranks to load the model",
        facts={
            "expected": f"{named(ranks, {})}, within {waited:.0f} s",
            "joined": named(sorted({*ranks} - {*missing}), {}),
        },
        hint="see their logs: they may have exited, loaded without tp_plan, or run where hf_rocm leaves models "
        "stock (no ROCm, and not forced); HF_ROCM_RANKS_TIMEOUT sets a longer wait for ranks that start slowly",
    )


def _store_lost(here: Place, error: BaseException) -> RankError:
    cause = " ".join(str(error).split())
    return RankError(
        "the rank lost its connection to the rendezvous store, or never reached it",
        facts={"rank": here.rank, "torch error": cause[:300]},
        hint="see the log of rank 0, which serves the store unless torchrun does; check MASTER_ADDR and MASTER_PORT",
    )


def _error(end: bytes) -> RankError | None:
    """Return the error with which a handshake ended, or None."""
    if end == b"go on":
        return None
    fields = json.loads(end)
    return RankError(fields["message"], facts=fields["facts"], hint=fields["hint"])
