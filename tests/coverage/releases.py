"""Which cases run in which of the tested releases: what would prove the same in two runs in the newer one."""

from __future__ import annotations

from functools import cache

from hf_rocm.overlay import catalog
from tests.coverage.case import Case
from tests.releases import RELEASE, TESTED

# one case of each kind of input, mask and cache
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
    """Whether no newer release that is tested runs the case with the same overlay."""
    find = overlays().find
    here = find(case.overlay, str(RELEASE))
    newer = [find(case.overlay, str(version)) for version in TESTED if version > RELEASE and case.runs_in(version)]
    return here not in newer


def is_the_first() -> bool:
    """Whether no older release is tested: its caches and its generation are those of transformers 4."""
    return min(TESTED) >= RELEASE
