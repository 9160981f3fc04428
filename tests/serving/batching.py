"""Small calls to transformers' continuous batching that work in every release from 4.56 on."""

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

# A batch has at most 32 tokens, fewer than all prompts together, so that some prompts wait. The block size is left to
# transformers: 32 in 4.57 and 5.0, and pages of 256 in later releases.
BLOCKS = {"num_blocks": 16, "max_batch_tokens": 32}

# The attention implementation that supports pages. In 4.x, the user selects it. 5.0 selects it for the model. Later
# releases pass the pages to sdpa.
PAGED = "sdpa_paged" if RELEASE.major == 4 else "sdpa"
EAGER = "eager_paged" if RELEASE.major == 4 else "paged|eager"

HAS_BATCHING = RELEASE.release >= (4, 56)

needs_batching = pytest.mark.skipif(
    not HAS_BATCHING, reason="not run: continuous batching before 4.56 is experimental and has a different interface"
)


def restores_implementation() -> bool:
    """Whether continuous batching replaces the attention implementation and restores it afterwards."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    return hasattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn")


def memory_is_known() -> bool:
    """Whether this release can read the size of the host's memory. Older releases only read that of accelerators."""
    from transformers.generation.continuous_batching import cache

    read = cache.get_device_and_memory_breakdown
    arguments = (torch.device("cpu"),) if inspect.signature(read).parameters else ()
    return read(*arguments)[1] is not None


@contextmanager
def paged(model: Any, implementation: str = PAGED) -> Iterator[None]:
    """Within the block, set the attention implementation that continuous batching requires."""
    previous = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


def batch(model: Any, prompts: Sequence[Sequence[int]], *, graphs: bool | None = None) -> list[list[int]]:
    """Returns the tokens of `generate_batch` in the order of the prompts. Every request must finish.

    graphs: whether transformers records its own graphs, in releases that support them. None: transformers' default.
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
    lists = [list(prompt) for prompt in prompts]
    results = model.generate_batch(lists, generation_config=config, **arguments).values()
    assert len(results) == len(lists), f"{len(results)} of {len(lists)} requests returned a result"
    # transformers 5.0 returns results in a different order
    tokens = {tuple(result.prompt_ids): list(result.generated_tokens) for result in results}
    return [tokens[tuple(prompt)] for prompt in lists]


def one_by_one(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the tokens of `generate`, called with one prompt at a time."""
    sequences = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        sequences.append(output[0, len(prompt) :].tolist())
    return sequences


def prompts(vocabulary: int = 61) -> list[list[int]]:
    """Prompts that don't all fit into one batch. The shortest is a single token."""
    generator = torch.Generator().manual_seed(3)
    lengths = (9, 1, 23, 4, 17)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]
