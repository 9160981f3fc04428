"""Recorded steps with collectives. test_tensor_parallel.py runs this script as two ranks on separate GPUs.

Arguments: a checkpoint, and a folder where each rank writes its results as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import hf_rocm
from hf_rocm.generation.state import known


def main(checkpoint: str, out: str) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    arguments = {"tp_plan": "auto", "dtype": torch.float32}
    stock = transformers.LlamaForCausalLM.from_pretrained(checkpoint, **arguments).eval()
    prepared = hf_rocm.from_pretrained(checkpoint, force=True, graphs=True, **arguments).eval()
    ids = torch.tensor([[5, 9, 31, 7], [3, 44, 8, 21]], device="cuda")
    results = {}
    for name, model in (("stock", stock), ("prepared", prepared)):
        tokens = [model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n) for n in (24, 12)]
        results[name] = [tensor.tolist() for tensor in tokens]
    state = known(prepared)
    results["recorded"], results["replayed"] = state.recorded, state.replayed
    Path(out, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
