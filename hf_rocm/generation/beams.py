"""Beam search: which models reorder a `DecodeCache` between two steps, and why the others don't."""

from __future__ import annotations

from typing import Any

from hf_rocm import features
from hf_rocm.generation.methods import own

MODES = ("beam_search", "beam_sample")


def refuses(model: Any) -> str | None:
    """The reason why beam search with this model does not use recorded steps, or None."""
    from transformers import GenerationMixin

    if own(type(model), "_beam_search", GenerationMixin):
        return f"{type(model).__name__} overrides _beam_search"
    # in releases with `_temporary_reorder_cache`, caches reorder themselves
    temporary = hasattr(GenerationMixin, "_temporary_reorder_cache")
    if "gptbigcode" in type(model).__name__.lower() if temporary else hasattr(model, "_reorder_cache"):
        return f"{type(model).__name__} reorders its cache itself"
    return features.refuses("beams")
