"""Messages that every rank emits are logged once, by rank 0. Messages that only another rank emits are logged, too."""

from __future__ import annotations

import logging
import threading

import pytest
from torch.distributed import HashStore

from hf_rocm.distributed import rank_logging
from hf_rocm.distributed.environment import Place
from hf_rocm.distributed.rank_logging import log_once

log = logging.getLogger("hf_rocm")


@pytest.fixture(autouse=True)
def messages(monkeypatch, caplog):
    monkeypatch.setattr(rank_logging, "WAIT", 0.1)
    with caplog.at_level(logging.INFO, logger="hf_rocm"):
        yield lambda: [record.getMessage() for record in caplog.records]
    assert not log.filters


def test_messages_of_rank_0_are_not_repeated(messages):
    store = HashStore()
    for rank in range(3):
        with log_once(Place(rank, 3, rank), store):
            log.info("%d layers fused", 8)
            log.warning("all of them")
    assert messages() == ["8 layers fused", "all of them"]


def test_messages_that_only_other_ranks_log_are_prefixed_with_the_rank_except_errors(messages):
    store = HashStore()
    for rank in range(2):
        with log_once(Place(rank, 2, rank), store):
            log.warning("everywhere")
            if rank == 1:
                log.warning("only %s", "here")
                log.error("broken")
    assert messages() == ["everywhere", "broken", "rank 1: only here"]


def test_messages_are_logged_if_the_load_fails(messages):
    with pytest.raises(ValueError, match="no weights"), log_once(Place(1, 2, 1), HashStore()):
        log.info("so far so good")
        raise ValueError("no weights")
    assert messages() == ["rank 1: so far so good"]


def test_progress_and_messages_of_other_threads_are_logged(messages):
    with log_once(Place(1, 2, 1), None):
        log.handle(log.makeRecord("hf_rocm", logging.WARNING, "hf_rocm/ops/probe_worker.py", 1, "building", (), None))
        thread = threading.Thread(target=log.warning, args=("from another thread",))
        thread.start()
        thread.join()
    assert messages() == ["building", "from another thread"]


def test_without_a_store_the_first_rank_of_every_machine_logs(messages):
    for rank in range(4):
        with log_once(Place(rank, 4, rank % 2), None):
            log.warning("stays stock on %d", rank)
    assert messages() == ["stays stock on 0", "stays stock on 2"]
