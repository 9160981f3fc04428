"""Coordinate a load by several ranks: they compare their settings before it and log each message once during it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hf_rocm import options
from hf_rocm.distributed import heads
from hf_rocm.distributed.agree import agree
from hf_rocm.distributed.environment import (
    Place,
    existing_store,
    partners,
    place,
    process_group_store,
    store,
    tensor_parallel_size,
)
from hf_rocm.distributed.facts import HINT, facts
from hf_rocm.distributed.rank_logging import WAIT, log_once
from hf_rocm.errors import RankError

_log = logging.getLogger("hf_rocm")


@contextmanager
def together(arguments: Mapping[str, Any], config: Callable[[], Any], *, served: bool) -> Iterator[None]:
    """Coordinate the ranks that load the same model within the block.

    arguments: those of hf_rocm and transformers, as the user gave them. config: a function that returns the model's
    config, or None if it has none. served: False if the model stays stock; in that case, the ranks are not compared.
    If the ranks can't run the model together, raises the same `RankError` on every rank that joined. A rank that can't
    reach the store raises a different one.
    """
    here = place()
    if here is None:
        yield
        return
    joined = served and bool(partners(here, arguments))
    if served:
        _agree(here, arguments, config)
    try:
        shared = existing_store(here, timeout=WAIT) if served else process_group_store()
    except RuntimeError:
        # Every rank then logs its own messages.
        shared = None
    if served and shared is None:
        yield
        return
    with log_once(here, shared, together=joined):
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
            _log.warning("the ranks share no store, so the models that they load are not compared")
    else:
        agree(shared, here, ranks, lambda: facts(here, arguments, config()), timeout=timeout, hint=HINT)
    heads.check(config(), tensor_parallel_size(here, arguments), arguments)


def _unreachable(here: Place, timeout: float, error: RuntimeError) -> RankError:
    variables = options.launcher()
    address = f"{variables.get('MASTER_ADDR')}:{variables.get('MASTER_PORT')}"
    cause = {"torch error": " ".join(str(error).split())[:300]}
    if here.rank == 0:
        return RankError(
            f"rank 0 can't serve the rendezvous store at {address}", facts=cause, hint="set MASTER_PORT to a free port"
        )
    return RankError(
        "rank 0 did not join the other ranks to load the model",
        facts={"expected": f"a store at {address}, within {timeout:g} s", "seen by": f"rank {here.rank}", **cause},
        hint="see the log of rank 0; check MASTER_ADDR and MASTER_PORT; HF_ROCM_RANKS_TIMEOUT sets a longer wait",
    )
