"""transformers' continuous batching as its releases want it called, small enough for a test."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

RELEASE = Version(transformers.__version__)
NEW = 12

# The block size is not given: 4.57 and 5.0 take 32, later releases pages of 256.
BLOCKS = {"num_blocks": 16, "max_batch_tokens": 32}  # less than the prompts have together, so that some wait

# What runs over pages: 4.x leaves it to the user to ask for it, 5.0 exchanges what the model has, and later releases
# hand the pages to sdpa itself.
PAGED = "sdpa_paged" if RELEASE.major == 4 else "sdpa"
EAGER = "eager_paged" if RELEASE.major == 4 else "paged|eager"

HAS_BATCHING = RELEASE.release >= (4, 56)

needs_batching = pytest.mark.skipif(
    not HAS_BATCHING, reason="not run: continuous batching before 4.56 is an experiment with another interface"
)


def gives_back() -> bool:
    """Whether continuous batching exchanges the attention implementation itself, and puts the model's own back."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    return hasattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn")


def memory_is_known() -> bool:
    """Whether this release can tell how much memory the machine has: older ones know accelerators only."""
    from transformers.generation.continuous_batching import cache

    read = cache.get_device_and_memory_breakdown
    arguments = (torch.device("cpu"),) if inspect.signature(read).parameters else ()
    return read(*arguments)[1] is not None


@contextmanager
def paged(model: Any, implementation: str = PAGED) -> Iterator[None]:
    """The attention implementation that continuous batching wants, and the model's own back at the end."""
    own = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def batch(model: Any, prompts: Sequence[Sequence[int]], *, graphs: bool | None = None) -> list[list[int]]:
    """The tokens of `generate_batch`, in the order of the prompts; every request has to finish.

    graphs: whether transformers records graphs of its own, in the releases that can, or None for its choice.
    """
    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    arguments: dict[str, Any] = {"progress_bar": False}
    if "continuous_batching_config" in inspect.signature(type(model).generate_batch).parameters:
        from transformers.generation import ContinuousBatchingConfig

        arguments["continuous_batching_config"] = ContinuousBatchingConfig(
            **BLOCKS, use_cuda_graph=graphs, auto_switch_to_flash=False
        )
    else:
        for name, value in BLOCKS.items():
            setattr(config, name, value)
    asked = [list(each) for each in prompts]
    results = model.generate_batch(asked, generation_config=config, **arguments).values()
    assert len(results) == len(asked), f"{len(results)} of {len(asked)} requests came back"
    found = {tuple(each.prompt_ids): list(each.generated_tokens) for each in results}  # 5.0 gives them in another order
    return [found[tuple(prompt)] for prompt in asked]


def one_by_one(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens of ordinary `generate`, a prompt at a time."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        found.append(made[0, len(prompt) :].tolist())
    return found


def prompts(vocabulary: int = 61) -> list[list[int]]:
    """Of lengths that don't fit one batch together, the shortest a single token."""
    generator = torch.Generator().manual_seed(3)
    lengths = (9, 1, 23, 4, 17)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]
