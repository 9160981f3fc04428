"""Marks for tests that run only with some of the tested releases. docs/testing.md gives the reasons."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from packaging.version import Version

RELEASE = Version(transformers.__version__)
# every tested release has a record in docs/support
TESTED = [Version(path.stem) for path in (Path(__file__).resolve().parents[1] / "docs" / "support").glob("*.json")]

NEWEST = max(TESTED) == RELEASE

at_the_ends = pytest.mark.skipif(
    min(TESTED) < RELEASE < max(TESTED), reason="runs with the oldest and the newest tested release"
)
in_the_newest = pytest.mark.skipif(not NEWEST, reason="runs with the newest tested release")
