"""Deduplicate log records of ranks that load models: a message that all ranks would log comes from rank 0.

With a store, no message is lost: the other ranks buffer their records while they load, then drop the messages that
rank 0 has also logged and log all others, prefixed with the rank's number. Errors are never buffered.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hf_rocm.distributed.environment import Place, attempt

# Seconds that a rank waits, after its own load, for rank 0 to log the same message: for a model that they load
# together, and for one that rank 0 may never load.
WAIT, WAIT_SEPARATE = 5.0, 1.0
# The module that logs the progress of a build, which one rank runs for all ranks.
_ALWAYS = "probe_worker"

_log = logging.getLogger("hf_rocm")


@contextmanager
def log_once(here: Place, store: Any | None, *, together: bool = True) -> Iterator[None]:
    """Within the block, log every message of this thread once for all ranks.

    store: the store in which rank 0 publishes what it logged. Without one, only the first rank of each machine logs:
    use this for messages that are the same for all ranks that share an environment. together: whether all
    ranks run such a block at the same time.
    """
    buffer = _Buffer(here, store, WAIT if together else WAIT_SEPARATE)
    _log.addFilter(buffer)
    try:
        yield
    finally:
        _log.removeFilter(buffer)
        buffer.flush()


class _Buffer(logging.Filter):
    def __init__(self, here: Place, store: Any | None, wait: float) -> None:
        super().__init__()
        self.wait = wait
        self.here, self.store, self.thread = here, store, threading.get_ident()
        self.records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self.thread or record.levelno >= logging.ERROR or record.module == _ALWAYS:
            return True
        if self.here.rank == 0:
            # `set` raises RuntimeError if the store no longer exists, for example after the other ranks have ended.
            with suppress(RuntimeError):
                if self.store is not None:
                    self.store.set(_key(record), "")
            return True
        if self.store is None and self.here.local == 0:
            return True
        self.records.append(record)
        return False

    def flush(self) -> None:
        """Log the buffered messages that rank 0 did not log. Without a store, none are logged."""
        if self.store is None:
            return
        deadline = time.monotonic() + self.wait
        for record in self.records:
            if not self._logged_by_rank_0(record, deadline):
                record.msg, record.args = f"rank {self.here.rank}: {record.getMessage()}", ()
                _log.handle(record)

    def _logged_by_rank_0(self, record: logging.LogRecord, deadline: float) -> bool:
        assert self.store is not None
        with suppress(RuntimeError):
            while not self.store.check([_key(record)]):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.02)
            return True
        return False


def _key(record: logging.LogRecord) -> str:
    return f"hf_rocm/{attempt()}/logged/{hashlib.sha256(record.getMessage().encode()).hexdigest()}"
