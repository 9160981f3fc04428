"""Run functions in threads, with frequent switches between the threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def running(*functions: Callable[[], object], interval: float = 1e-6) -> Iterator[list[BaseException]]:
    """Run each function in its own thread during the block, which ends when all of them have returned.

    interval: the interval in seconds after which Python switches threads. Yields a list, to which the exceptions of the
    threads are added.
    """
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 (the test compares the list)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        for thread in threads:
            thread.start()
        yield errors
    finally:
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
