"""What is done around a load by several ranks: they agree before it, and speak with one voice during it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hf_rocm import options
from hf_rocm.errors import RankError
from hf_rocm.ranks import heads
from hf_rocm.ranks.agree import agree
from hf_rocm.ranks.environment import (
    Place,
    existing_store,
    groups_store,
    partners,
    place,
    store,
    tensor_parallel_size,
)
from hf_rocm.ranks.facts import HINT, facts
from hf_rocm.ranks.voice import PATIENCE, one_voice

_log = logging.getLogger("hf_rocm")


@contextmanager
def together(arguments: Mapping[str, Any], config: Callable[[], Any], *, served: bool) -> Iterator[None]:
    """Load within the block. arguments: ours and transformers', as they were given.

    config: gives the model's config, or None where it has none. served: hf_rocm serves the model here; where it stays
    stock nothing is asked of the other ranks. Raises `RankError`, the same on every rank that came.
    """
    here = place()
    if here is None:
        yield
        return
    joined = served and bool(partners(here, arguments))
    if served:
        _agree(here, arguments, config)
    try:
        shared = existing_store(here, timeout=PATIENCE) if served else groups_store()
    except RuntimeError:
        shared = None  # then each says its own
    if served and shared is None:
        yield
        return
    with one_voice(here, shared, together=joined):
        yield


def _agree(here: Place, arguments: Mapping[str, Any], config: Callable[[], Any]) -> None:
    ranks = partners(here, arguments)
    if not ranks:
        return
    timeout = options.current().ranks_timeout
    try:
        shared = store(here, timeout=timeout)
    except RuntimeError as error:
        raise _unreachable(here, timeout, error) from error
    if shared is None:
        if here.rank == ranks[0]:
            _log.warning("the ranks have no store in common, so what they load is not compared")
    else:
        agree(shared, here, ranks, lambda: facts(here, arguments, config()), timeout=timeout, hint=HINT)
    heads.check(config(), tensor_parallel_size(here, arguments), arguments)


def _unreachable(here: Place, timeout: float, error: RuntimeError) -> RankError:
    said = options.launcher()
    place = f"{said.get('MASTER_ADDR')}:{said.get('MASTER_PORT')}"
    words = {"torch says": " ".join(str(error).split())[:300]}
    if here.rank == 0:
        return RankError(
            f"rank 0 can't serve the other ranks at {place}", facts=words, hint="give MASTER_PORT another free port"
        )
    return RankError(
        "rank 0 did not come to load the model with the others",
        facts={"expected": f"it serves {place}, within {timeout:g} s", "seen by": f"rank {here.rank}", **words},
        hint="see what rank 0 logged; check MASTER_ADDR and MASTER_PORT; HF_ROCM_RANKS_TIMEOUT gives it more seconds",
    )
