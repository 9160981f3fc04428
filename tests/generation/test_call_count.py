"""The host cost of an uncaptured decode step of a prepared model, in calls of Python functions."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm import ops

LAYERS = 8
# Maximum number of calls per step; stock makes 1,184 in transformers 5.23 with torch 2.13.
MOST_CALLS = 1300
# Maximum number of hf_rocm's modules (not counting the overlay) whose functions run in one call of a decoder layer.
MOST_FILES = 10
NEWEST = transformers.__version__.startswith("5.23")
PACKAGE = str(Path(hf_rocm.__file__).parent)
# The path in an installed package; a checkout has another one.
OVERLAYS = str(Path(PACKAGE, "_overlays"))

pytestmark = pytest.mark.skipif(not NEWEST, reason="the number of stock calls differs in other releases")


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """Return (the stock model, a prepared model whose steps are not recorded)."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    stock = transformers.LlamaForCausalLM(config).eval()
    return stock, hf_rocm.prepare(copy.deepcopy(stock), force=True)


def generate(model: Any, new: int) -> torch.Tensor:
    result: torch.Tensor = model.generate(
        torch.arange(3, 7)[None], max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return result


def calls(function: Callable[[], object]) -> Counter[str]:
    """The number of calls of Python functions, by file."""
    counts: Counter[str] = Counter()

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            counts[frame.f_code.co_filename] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return counts


def calls_of_a_step(model: Any) -> int:
    """The number of calls in one step: the difference between generating 9 and 8 tokens, after two warm-ups."""
    for _ in range(2):
        generate(model, 9)
    return calls(lambda: generate(model, 9)).total() - calls(lambda: generate(model, 8)).total()


def test_an_uncaptured_step_makes_few_calls(pair) -> None:
    stock, prepared = pair
    with ops.recording() as routes:
        tokens = generate(prepared, 8)
    assert torch.equal(tokens, generate(stock, 8))
    steps = Counter(route.operation for route in routes)
    # q_proj, k_proj and v_proj are fused, and so are gate_proj and up_proj
    per_step = {"linear": 2, "rms_norm": 1, "add_rms_norm": 1, "rope": 1, "attention": 1, "act_and_mul": 1}
    final_norms = {"rms_norm": 1}
    assert steps == {name: 8 * (count * LAYERS + final_norms.get(name, 0)) for name, count in per_step.items()}
    sizes = {route.shapes[1] for route in routes if route.operation == "linear"}
    assert sizes == {(4 * 16 + 2 * 2 * 16, 64), (2 * 96, 64)}
    assert calls_of_a_step(prepared) <= MOST_CALLS
    assert calls_of_a_step(stock) < MOST_CALLS


def test_a_layer_enters_few_modules(pair) -> None:
    _, prepared = pair
    layer = prepared.model.layers[3]
    files: list[set[str]] = []

    inner = type(layer).__call__

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not layer:
            return inner(self, *args, **kwargs)
        results: list[Any] = []
        counts = calls(lambda: results.append(inner(self, *args, **kwargs)))
        files.append({file for file in counts if file.startswith(PACKAGE) and not file.startswith(OVERLAYS)})
        return results[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer), "__call__", watched)
        generate(prepared, 8)
    assert len(files) == 8
    assert len(files[-1]) <= MOST_FILES, sorted(file.removeprefix(PACKAGE) for file in files[-1])
