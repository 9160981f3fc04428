"""Run by test_ranks.py on each of two ranks: the handshake before the ranks load, and the log messages.

Arguments: a checkpoint, and one whose heads can't be divided. Prints a line of JSON: check → observation.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

import torch
import torch.distributed as dist
import transformers
from transformers import LlamaForCausalLM

import hf_rocm
from hf_rocm import options
from hf_rocm.distributed import agree, environment
from hf_rocm.errors import RankError

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

IDS = torch.tensor([[1, 2, 3, 4, 5]])


class Messages(logging.Handler):
    """Collect the messages of the hf_rocm logger."""

    def __init__(self):
        super().__init__()
        self.words = []
        logging.getLogger("hf_rocm").addHandler(self)
        logging.getLogger("hf_rocm").setLevel(logging.INFO)

    def emit(self, record):
        self.words.append(record.getMessage())

    def drain(self):
        words, self.words = self.words, []
        return words


def main(checkpoint: str, undivided: str) -> None:
    messages, observations = Messages(), {}

    def load(folder=checkpoint, **arguments):
        return hf_rocm.from_pretrained(folder, **{"tp_plan": "auto", "force": True, **arguments}).eval()

    def refusal(**arguments):
        try:
            load(**arguments)
        except RankError as error:
            return str(error)
        return "loaded"

    assert not dist.is_initialized()
    # without a process group, the handshake uses a separate store on the port that transformers uses afterwards
    observations["heads"] = refusal(folder=undivided)
    rank = environment.place().rank
    observations["dtype"] = refusal(dtype=[torch.float32, torch.float64][rank])
    assert not dist.is_initialized(), "a refused load created a process group"
    model = load()
    assert dist.is_initialized()
    tokens = model.generate(IDS, max_new_tokens=6, do_sample=False).tolist()
    observations["calls"] = next(agree._calls[rank, "0,1"])
    # with a process group, the handshake uses its store
    with options.override(tier=["torch", "eager"][rank]):
        observations["option"] = refusal()
    began = time.perf_counter()
    again = load()
    observations["seconds"] = time.perf_counter() - began
    assert again.generate(IDS, max_new_tokens=6, do_sample=False).tolist() == tokens
    # a model that stays stock is loaded without a handshake with the other ranks
    before = next(agree._calls[rank, "0,1"])
    messages.drain()
    stock = load(force=None)
    observations["stock messages"] = messages.drain()
    assert next(agree._calls[rank, "0,1"]) == before + 1
    assert stock.generate(IDS, max_new_tokens=6, do_sample=False).tolist() == tokens
    # a single-process load waits for no other rank
    if rank == 1:
        load(tp_plan=None)
    dist.barrier()
    # in a single-process load, rank 1 logs only messages that rank 0 has not logged
    messages.drain()
    load(tp_plan=None, quantize="int8")
    observations["own messages"] = messages.drain()
    # the behaviour of stock with heads that can't be divided
    try:
        with torch.no_grad():
            LlamaForCausalLM.from_pretrained(undivided, tp_plan="auto")(IDS)
        observations["stock heads"] = "ran"
    except RuntimeError as error:
        observations["stock heads"] = str(error)
    observations["rank"] = dist.get_rank()
    # Use a single write, because print makes two, and ranks may share an output file.
    os.write(1, f"{json.dumps(observations)}\n".encode())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
