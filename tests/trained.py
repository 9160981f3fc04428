"""Checks of the trained model on any device: greedy tokens equal stock's, and logits are as accurate as eager's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_rocm
from hf_rocm import ops
from tests.tolerance import assert_as_good_as_eager

NEW = 512
PROMPT = "The following statement is executed"
KERNELS = {"rms_norm", "act_and_mul", "rope_into_cache"}


class Trained:
    """A checkpoint and a prompt. `stock` loads the checkpoint with eager attention, and `prepared` with hf_rocm."""

    def __init__(self, checkpoint: Path, device: str = "cpu", *, graphs: bool) -> None:
        self.checkpoint, self.device, self.graphs = checkpoint, device, graphs
        self.prompt = AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt")["input_ids"].to(device)

    def stock(self, dtype: torch.dtype = torch.float32) -> Any:
        model = AutoModelForCausalLM.from_pretrained(self.checkpoint, torch_dtype=dtype, attn_implementation="eager")
        return model.to(self.device).eval()

    def prepared(self, dtype: torch.dtype = torch.float32) -> Any:
        model = AutoModelForCausalLM.from_pretrained(self.checkpoint, torch_dtype=dtype).to(self.device).eval()
        return hf_rocm.prepare(model, force=True, graphs=self.graphs)

    def greedy(self, model: Any, new: int = NEW) -> Tensor:
        mask = torch.ones_like(self.prompt)
        tokens: Tensor = model.generate(
            self.prompt, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        return tokens


def check_greedy_tokens(trained: Trained, new: int = NEW) -> tuple[Any, set[str]]:
    """Check the greedy tokens. Returns the prepared model, and the operations that the Triton tier served."""
    prepared = trained.prepared()
    with torch.no_grad(), ops.recording() as routes:
        actual = trained.greedy(prepared, new)
    assert torch.equal(actual, trained.greedy(trained.stock(), new))
    assert actual.shape[1] == trained.prompt.shape[1] + new
    return prepared, _by_triton(routes)


@torch.inference_mode()
def check_logits(trained: Trained, dtype: torch.dtype = torch.bfloat16) -> set[str]:
    """Check that teacher-forced logits in `dtype` are as accurate as eager's.

    Returns the operations that the Triton tier served.
    """
    text = trained.greedy(trained.stock(), new=60)

    def logits(model: Any) -> Tensor:
        output: Tensor = model(input_ids=text).logits
        return output

    with ops.recording() as routes:
        actual = logits(trained.prepared(dtype))
    assert_as_good_as_eager(actual, logits(trained.stock(dtype)), logits(trained.stock(torch.float64)))
    return _by_triton(routes)


def _by_triton(routes: Any) -> set[str]:
    return {route.operation for route in routes if route.tier == "triton"}
