"""Run by `accelerate launch` in each of two processes: split prompts, and a prepared model in an Accelerator.

Arguments: the checkpoint, and a folder to save to. This script passes `cpu=True`, because accelerate would otherwise
use a GPU if there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

import hf_rocm
from tests.tolerance import assert_as_good_as_eager
from tests.weights import models
from tests.weights.models import GROUPS, IDS, assert_matches_stock, assert_same_results, blocks, live, logits

PROMPTS = [[3, 1, 4], [1, 5, 9], [2, 6, 5], [3, 5, 8], [9, 7, 9]]


def main(checkpoint: str, folder: str) -> None:
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    assert (state.num_processes, state.backend) == (2, "gloo")
    for check in (prompts_are_split, wrapped_and_unwrapped, mixed_precision):
        check(checkpoint, Path(folder))
        state.wait_for_everyone()
        state.print(check.__name__, flush=True)
    state.destroy_process_group()


def prepared(checkpoint: str):
    """Load and prepare this process's copy of the model."""
    model = hf_rocm.from_pretrained(checkpoint, force=True).eval()
    assert live(model) == GROUPS
    return model


def tokens(model, prompt):
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()


def prompts_are_split(checkpoint: str, folder: Path) -> None:
    model, state = prepared(checkpoint), PartialState()
    with state.split_between_processes(PROMPTS) as share:
        assert 0 < len(share) < len(PROMPTS)
        texts = gather_object([tokens(model, prompt) for prompt in share])
    stock = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    assert texts == [tokens(stock, prompt) for prompt in PROMPTS]
    assert_matches_stock(model, GROUPS)


def wrapped_and_unwrapped(checkpoint: str, folder: Path) -> None:
    model, accelerator = prepared(checkpoint), Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    assert type(wrapped) is DistributedDataParallel and accelerator.unwrap_model(wrapped) is model
    assert_matches_stock(model, GROUPS)
    before = logits(model)
    accelerator.save_state(folder / "state")
    loss = wrapped(IDS, labels=IDS, use_cache=False).loss
    accelerator.backward(loss)
    optimizer.step()
    assert not torch.allclose(logits(model), before)
    # The fused groups have the updated weights.
    assert_matches_stock(model, GROUPS)
    accelerator.save_model(wrapped, folder / "model")
    if accelerator.is_main_process:
        model.config.save_pretrained(folder / "model")
    accelerator.wait_for_everyone()
    reloaded = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    stock = models.stock_with_weights_of(model)
    assert_same_results(reloaded, stock)
    accelerator.load_state(folder / "state")
    torch.testing.assert_close(logits(model), before)
    assert_matches_stock(model, GROUPS)


def mixed_precision(checkpoint: str, folder: Path) -> None:
    """The Accelerator replaces the forward of the model, and `unwrap_model` restores it."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, stock = prepared(checkpoint), LlamaForCausalLM.from_pretrained(checkpoint).eval()
    wrapped = [accelerator.prepare_model(variant, evaluation_mode=True) for variant in (model, stock)]
    assert "forward" in model.__dict__
    actual, eager = map(logits, wrapped)
    assert_as_good_as_eager(actual, eager, logits(models.build().double()))
    assert accelerator.unwrap_model(wrapped[0], keep_fp32_wrapper=False) is model
    assert blocks(model) == GROUPS
    assert_matches_stock(model, GROUPS)


if __name__ == "__main__":
    main(*sys.argv[1:])
