"""Run the command line in this process on a copy of the installed transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from hf_rocm.cli import main
from tests.overlay.conftest import Site, site

__all__ = ["site"]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(site: Site, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(name: str, *arguments: str) -> Outcome:
        code = main([name, "--transformers-path", str(site.path), *arguments])
        return Outcome(code, *capsys.readouterr())

    return run
