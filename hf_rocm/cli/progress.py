"""Progress of long-running work on stderr: one redrawn line on a terminal, and occasional lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from hf_rocm.cli.output import console

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_REDRAW = 0.1  # seconds


class Progress:
    """A context manager whose `count` and `step` show the progress.

    unit: what is counted, such as `files read`. every: the minimum number of seconds between two lines if
    stderr is not a terminal; None: print no lines.
    """

    def __init__(self, unit: str = "", *, every: float | None = None) -> None:
        self._unit = unit
        self._every = every
        self._began = time.monotonic()
        self._last = -float("inf")
        self._live = sys.stderr.isatty()
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        return self

    def count(self, done: int, total: int) -> None:
        """Show that `done` of `total` are finished."""
        self._show(f"{done} of {total} {self._unit}", done, total)

    def step(self, text: str) -> None:
        """Show the step that begins now."""
        self._show(text, None, None)

    @property
    def time(self) -> str:
        """The time since the start as text, such as `2 min 5 s`."""
        seconds = int(time.monotonic() - self._began)
        return f"{seconds // 60} min {seconds % 60} s" if seconds >= 60 else f"{seconds} s"

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self, text: str, done: int | None, total: int | None) -> None:
        now = time.monotonic()
        if self._live and (total is None or done == total or now - self._last > _REDRAW):
            self._last = now
            self._draw(text, done, total)
        elif not self._live and self._every is not None and now - self._last > self._every:
            self._last = now
            print(text, file=sys.stderr, flush=True)

    def _draw(self, text: str, done: int | None, total: int | None) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            counting = (BarColumn(bar_width=24), TimeElapsedColumn()) if total is not None else ()
            # redrawn only here: no refresh thread is started, and other output is not redirected
            self._bar = Progress(
                TextColumn("{task.description}", markup=False), *counting, console=console(sys.stderr),
                auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._bar.start()
            self._bar.add_task(text)
        self._bar.update(self._bar.task_ids[0], description=text, completed=done, total=total)
        self._bar.refresh()
