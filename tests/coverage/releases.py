"""Select the cases for each tested release. If a case would test the same code in several releases, it usually runs
only in the newest one."""

from __future__ import annotations

import zlib
from functools import cache

from hf_rocm.overlay import catalog
from tests.coverage.case import Case
from tests.releases import RELEASE, TESTED

# cases whose `generate` is tested in every release, with most kinds of input, mask and cache
EVERYWHERE = {
    "llama",
    "gemma2",
    "gpt2",
    "bert",
    "t5",
    "siglip",
    "qwen2_vl",
    "mixtral",
    "mistral",
    "whisper",
    "paligemma",
}


overlays = cache(catalog.load)


def is_the_last(case: Case) -> bool:
    """Whether no newer tested release runs the case with the same overlay."""
    find = overlays().find
    current = find(case.overlay, str(RELEASE))
    newer = [find(case.overlay, str(version)) for version in TESTED if version > RELEASE and case.runs_in(version)]
    return current not in newer


def is_drawn(case: Case) -> bool:
    """Whether the slowest tests run the case. A hash of its id selects about a quarter of all cases."""
    return zlib.crc32(case.id.encode()) % 4 == 0


def is_the_first() -> bool:
    """Whether the installed release is the oldest tested one, with the caches and generation of transformers 4."""
    return min(TESTED) >= RELEASE
