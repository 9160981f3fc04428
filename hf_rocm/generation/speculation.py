"""Prompt lookup and assistant models: which calls verify their drafts with recorded steps, and why others don't.

A step verifies the drafted tokens and computes one more, so there is one recording per number of drafts. The cache
drops rejected tokens by reducing its length. transformers decides how many tokens to draft and which to accept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_rocm import features
from hf_rocm.generation.methods import own

MODE = "assisted_generation"


def refuses(model: Any, generation_config: Any, assistant: Any) -> str | None:
    """Return why drafts are not verified with recorded steps, or None.

    generation_config: the call's own copy. assistant: the `assistant_model` of the call, or None.
    """
    from transformers import GenerationMixin

    if own(type(model), "_assisted_decoding", GenerationMixin):
        return f"{type(model).__name__} overrides _assisted_decoding"
    if model.config.is_encoder_decoder:
        return "drafts for encoder-decoder models are verified uncaptured"
    if generation_config.assistant_early_exit is not None:
        return "assistant_early_exit changes the model's config during the call"
    if generation_config.prompt_lookup_num_tokens is None:
        draft_method = getattr(generation_config, "speculation_type", None) or getattr(
            generation_config, "use_mtp", None
        )
        if assistant is None or draft_method or type(assistant).__name__.startswith(_READS_OUTPUTS):
            return "the drafts are computed from hidden states, which recorded steps don't return"
    return features.refuses("speculation")


# Assistants whose drafts transformers computes from outputs of the model.
_READS_OUTPUTS = ("Gemma4Assistant", "Gemma4UnifiedAssistant")


def refuses_windows(generation_config: Any, windows: Sequence[int | None], *, returned: bool = False) -> str | None:
    """Return why drafts are not verified with recorded steps over a cache with these windows, or None.

    returned: whether the call returns the cache.
    """
    if not any(windows):
        return None
    if returned:
        return "the call returns a cache with sliding windows, from which rejected drafts can't be removed"
    if generation_config.prompt_lookup_num_tokens is None:
        return "an assistant may draft any number of tokens, and sliding windows would have to keep that many more keys"
    return None


def verifying(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls this step and returns outputs whose logits transformers may keep and write to."""

    def verify(**arguments: Any) -> Any:
        outputs = step(**arguments)
        # transformers copies only logits of dtypes other than fp32.
        outputs.logits = outputs.logits.clone()
        return outputs

    return verify
