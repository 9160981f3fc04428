"""The handshake: every rank says what it has, all read it, and either all go on or all raise the same error.

It goes through a store, not through a collective: a store waits with a limit, and knows who has not come. It takes
milliseconds.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from hf_rocm.errors import HfRocmError, RankError
from hf_rocm.ranks.environment import Place, attempt

Facts = Mapping[str, str]

_PAUSE = 0.002  # seconds between two looks at the store; it doubles up to sixteen times that
_FAREWELL = 5.0  # seconds for the others to read an error before this rank ends, and perhaps the store with it
_SHOWN = 6  # differing facts; the rest is counted
_calls: dict[tuple[int, str], Iterator[int]] = {}


def agree(
    store: Any, here: Place, ranks: Sequence[int], find: Callable[[], Facts], *, timeout: float, hint: str
) -> None:
    """Compare what `find` says on each of `ranks`. Returns once all have said the same.

    Raises `RankError` on every rank that came: where facts differ, with the values and who has them; where `find`
    raised on one of them, with its words; and where one has not come after `timeout` seconds, with its number. hint:
    what to do about a difference.
    """
    call = _Call(store, here, ranks)
    mine: dict[str, Any] = {"host": socket.gethostname()}
    failure: BaseException | None = None
    try:
        mine["facts"] = dict(find())
    except Exception as error:  # noqa: BLE001 - the others wait: they are told, then it is raised
        failure = error
        mine["failed"] = _words(error)
    try:
        if failure is not None:  # before it is said: who reads what all have said goes on
            call.end(_failed(here.rank, mine))
        call.say(mine)
        found = call.collect(timeout)
    except RuntimeError as error:
        raise _gone(here, error) from (failure or error)
    decided = found if isinstance(found, RankError) else _compare(found, hint)
    if decided is not None:
        call.part()
        raise decided from failure


class _Call:
    """One handshake. Its keys are counted, since ranks may load several models."""

    def __init__(self, store: Any, here: Place, ranks: Sequence[int]) -> None:
        group = ",".join(map(str, ranks))
        number = next(_calls.setdefault((here.rank, group), count()))
        self.store, self.here, self.ranks = store, here, ranks
        self.prefix = f"hf_rocm/{attempt()}/{group}/{number}"

    def say(self, what: Mapping[str, Any]) -> None:
        self.store.set(self._key(self.here.rank), json.dumps(what))

    def end(self, error: RankError | None) -> RankError | None:
        """Put an end to it for all, None if they go on; unless another rank did already. Returns what holds."""
        mine = "go on" if error is None else json.dumps(error.to_dict())
        return _error(self.store.compare_set(f"{self.prefix}/end", "", mine))

    def collect(self, timeout: float) -> dict[int, dict[str, Any]] | RankError:
        """What every rank said, or the error by which another one ended it for all."""
        began, pause = time.monotonic(), _PAUSE
        ended, keys = f"{self.prefix}/end", [self._key(rank) for rank in self.ranks]
        while True:
            error = _error(self.store.get(ended)) if self.store.check([ended]) else None
            everyone = error is None and self.store.check(keys)
            waited = time.monotonic() - began
            if everyone:
                error = self.end(None)
                if error is None:
                    return {rank: json.loads(self.store.get(self._key(rank))) for rank in self.ranks}
            elif error is None and waited > timeout:
                missing = [rank for rank in self.ranks if not self.store.check([self._key(rank)])]
                error = self.end(_not_come(missing, self.ranks, waited))
            if error is not None:
                return error
            time.sleep(min(pause, max(_PAUSE, timeout - waited)))
            pause = min(2 * pause, 16 * _PAUSE)

    def part(self) -> None:
        """Wait a moment until those who came have read it too: the store may end with this process."""
        deadline = time.monotonic() + _FAREWELL
        try:
            self.store.set(f"{self.prefix}/read/{self.here.rank}", "")
            here = [rank for rank in self.ranks if self.store.check([self._key(rank)])]
            while here and time.monotonic() < deadline:
                here = [rank for rank in here if not self.store.check([f"{self.prefix}/read/{rank}"])]
                time.sleep(_PAUSE)
        except RuntimeError:
            pass  # it has ended, and with it those who would have waited

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/{rank}"


def _compare(said: Mapping[int, Mapping[str, Any]], hint: str) -> RankError | None:
    hosts = {rank: each["host"] for rank, each in said.items()}
    names = list(dict.fromkeys(name for each in said.values() for name in each["facts"]))
    differing = {}
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, each in said.items():
            values.setdefault(each["facts"].get(name, "absent"), []).append(rank)
        if len(values) > 1:
            differing[name] = "; ".join(f"{value} on {named(ranks, hosts)}" for value, ranks in values.items())
    if not differing:
        return None
    shown = list(differing)[:_SHOWN]
    facts = {name: differing[name] for name in shown}
    if len(differing) > _SHOWN:
        facts["and"] = f"{len(differing) - _SHOWN} more"
    what = f"{', '.join(shown)}{' and more' if len(differing) > _SHOWN else ''}"
    return RankError(f"the ranks would not run the same model; they differ in: {what}", facts=facts, hint=hint)


def named(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Ranks in words, with where they run: `ranks 0, 2–5 (node1, node2)`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    numbers = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    places = ", ".join(dict.fromkeys(hosts[rank] for rank in sorted(ranks) if rank in hosts))
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}" + (f" ({places})" if places else "")


def _words(error: BaseException) -> dict[str, Any]:
    if isinstance(error, HfRocmError):
        return error.to_dict()
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return {"message": text, "facts": {}, "hint": None}


def _failed(rank: int, said: Mapping[str, Any]) -> RankError:
    failed = said["failed"]
    return RankError(
        f"rank {rank} ({said['host']}) failed before the model was loaded: {failed['message']}",
        facts=failed["facts"],
        hint=failed["hint"] or f"see what rank {rank} logged",
    )


def _not_come(missing: Sequence[int], ranks: Sequence[int], waited: float) -> RankError:
    return RankError(
        f"{named(missing, {})} did not come to load the model with the others",
        facts={
            "expected": f"{named(ranks, {})}, within {waited:.0f} s",
            "came": named(sorted({*ranks} - {*missing}), {}),
        },
        hint="see what they logged: they may have ended before, load without tp_plan, or run where hf_rocm leaves "
        "models stock (no ROCm, and not forced); HF_ROCM_RANKS_TIMEOUT gives slow starters more seconds",
    )


def _gone(here: Place, error: BaseException) -> RankError:
    words = " ".join(str(error).split())
    return RankError(
        "the ranks lost the store through which they speak before loading, or never reached it",
        facts={"rank": here.rank, "torch says": words[:300]},
        hint="see what rank 0 logged, which serves it unless torchrun does, and check MASTER_ADDR and MASTER_PORT",
    )


def _error(end: bytes) -> RankError | None:
    """What a handshake ended with."""
    if end == b"go on":
        return None
    said = json.loads(end)
    return RankError(said["message"], facts=said["facts"], hint=said["hint"])
