"""Load, run and save a model, restore it if it is prepared, and print the memory that every step takes.

test_large.py runs this script.

Arguments: `stock` or `prepared`, the checkpoint, the dtype to load it in, and a folder to save to. Prints the number of
fused groups, and memory in bytes above the value before loading: allocated memory, and pages of the checkpoint's file.
Linux measures peaks, which include all memory and are reset before every step.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers import LlamaForCausalLM

import hf_rocm
from hf_rocm.layers.weight_group import SLOT
from hf_rocm.weights.fuse import Fused

TINY = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def main(kind: str, checkpoint: str, dtype: str, out: str) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    ids = torch.tensor([[1, 2, 3]])
    # run imports and one-time checks first, so that they are not counted
    with torch.inference_mode():
        hf_rocm.prepare(LlamaForCausalLM(transformers.LlamaConfig(**TINY)), force=True)(ids)
        # The weights are mapped, so no heap memory remains.
        LlamaForCausalLM.from_pretrained(checkpoint, torch_dtype="auto")
    measured = {}
    base, start = settled(), _status("VmRSS")
    with torch.inference_mode():
        load = hf_rocm.from_pretrained if kind == "prepared" else LlamaForCausalLM.from_pretrained
        model = load(checkpoint, torch_dtype=getattr(torch, dtype), **({"force": True} if kind == "prepared" else {}))
        model(ids)
    measured["load peak"] = peak() - start
    measured["after"] = after = settled() - base
    measured["fused"] = sum(type(module.__dict__.get(SLOT)) is Fused for module in model.modules())
    model.save_pretrained(out)
    measured["save peak"] = peak() - start
    measured["saved"] = settled() - base
    if kind == "prepared":
        hf_rocm.restore(model)
        measured["restore peak"] = peak() - start
        measured["restored"] = settled() - base
    assert after > 0
    print(json.dumps(measured))


def settled() -> int:
    """Return the bytes of allocated memory and of the checkpoint's mapped pages, and reset the peak."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    mapped, is_weights = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split(maxsplit=1)[0]
        if not word.endswith(":"):
            is_weights = line.endswith(".safetensors")
        elif is_weights and word == "Rss:":
            mapped += int(line.split()[1]) * 1024
        elif is_weights and word == "Anonymous:":
            # RssAnon below includes these pages.
            mapped -= int(line.split()[1]) * 1024
    return mapped + _status("RssAnon") + _status("VmSwap")


def peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
