"""Of N ranks that load the same model, one speaks: what each of them would say comes from rank 0 alone.

Nothing is lost by it. What another rank has to say is held back while it loads; what rank 0 said too is dropped then,
and the rest follows under the rank's number. Errors are never held back.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hf_rocm.ranks.environment import Place, attempt

# Seconds after its own load until a rank no longer waits for rank 0 to say the same: of a model that they load
# together, and of one that rank 0 may never load.
PATIENCE, APART = 5.0, 1.0
_ALWAYS = "probe_worker"  # words on a build under way, which one rank does for all

_log = logging.getLogger("hf_rocm")


@contextmanager
def one_voice(here: Place, store: Any | None, *, together: bool = True) -> Iterator[None]:
    """Within the block, what this thread logs about a load is said once for all ranks.

    store: through which ranks learn what rank 0 said. Without one only the first rank of each machine speaks: use it
    for words on what is the same for all that share an environment. together: every rank is in such a block now.
    """
    ear = _Ear(here, store, PATIENCE if together else APART)
    _log.addFilter(ear)
    try:
        yield
    finally:
        _log.removeFilter(ear)
        ear.release()


class _Ear(logging.Filter):
    def __init__(self, here: Place, store: Any | None, patience: float) -> None:
        super().__init__()
        self.patience = patience
        self.here, self.store, self.thread = here, store, threading.get_ident()
        self.held: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self.thread or record.levelno >= logging.ERROR or record.module == _ALWAYS:
            return True
        if self.here.rank == 0:
            with suppress(RuntimeError):  # the others are gone, and the store with them
                if self.store is not None:
                    self.store.set(_key(record), "")
            return True
        if self.store is None and self.here.local == 0:
            return True
        self.held.append(record)
        return False

    def release(self) -> None:
        """Say what rank 0 did not."""
        if self.store is None:
            return
        deadline = time.monotonic() + self.patience
        for record in self.held:
            if not self._said(record, deadline):
                record.msg, record.args = f"rank {self.here.rank}: {record.getMessage()}", ()
                _log.handle(record)

    def _said(self, record: logging.LogRecord, deadline: float) -> bool:
        assert self.store is not None
        with suppress(RuntimeError):
            while not self.store.check([_key(record)]):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.02)
            return True
        return False


def _key(record: logging.LogRecord) -> str:
    return f"hf_rocm/{attempt()}/said/{hashlib.sha256(record.getMessage().encode()).hexdigest()}"
