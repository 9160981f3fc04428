"""Run by test_training.py in each of two processes: FSDP and FSDP2 with prepared and stock models.

Argument: a folder. Each rank has a different batch. Stock also runs in float64, for the tolerance.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_rocm
from hf_rocm import ops
from hf_rocm.generation import decide
from hf_rocm.loading.prepare import REPORT
from tests.distributed.training_ranks import batch, run
from tests.tolerance import assert_as_good_as_eager, assert_run_as_good_as_eager
from tests.weights import models
from tests.weights.models import blocks, live, logits


def steps_like_stock(shard, gather, words: tuple[str, ...]) -> None:
    """Train and evaluate sharded models, and check that their results are as accurate as stock's.

    One model is prepared before it is sharded, and one afterwards. words: every reason why nothing is fused contains
    one of these words.
    """
    results = []
    for when in ("stock", "float64", "before", "after"):
        model = models.build()
        if when == "float64":
            model.double()
        if when == "before":
            hf_rocm.prepare(model, force=True)
        wrapped = shard(model)
        if when == "after":
            hf_rocm.prepare(model, force=True)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            wrapped(**batch(dist.get_rank()), use_cache=False).loss.backward()
            optimizer.step()
        wrapped.eval()
        with torch.no_grad(), ops.recording() as routes:
            output = wrapped(input_ids=models.IDS, use_cache=False).logits
        weights = gather(wrapped)
        results.append({"logits": output, **weights})
        if when in ("before", "after"):
            assert [route.operation for route in routes].count("attention") == models.LAYERS
            assert live(model) == blocks(model) == 0
            reasons = [reason for part in hf_rocm.explain(model).parts for reason in part.not_fused]
            assert reasons and all(any(word in reason for word in words) for reason in reasons), reasons
            twin = models.build()
            # This fails unless the weights have stock's layout.
            twin.load_state_dict(weights)
            assert_as_good_as_eager(output, logits(twin), logits(copy.deepcopy(twin).double()))
    stock, reference, *prepared = results
    for actual in prepared:
        assert_run_as_good_as_eager(actual, stock, reference, least=1e-3)


def fsdp(folder: Path) -> None:
    for original in (False, True):

        def shard(model, original=original):
            policy = ModuleWrapPolicy({LlamaDecoderLayer})
            settings = {"auto_wrap_policy": policy, "device_id": torch.device("cpu"), "use_orig_params": original}
            return FullyShardedDataParallel(model, **settings)

        def gather(wrapped):
            config = FullStateDictConfig(rank0_only=False)
            with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, config):
                return {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}

        steps_like_stock(shard, gather, ("not a separate parameter", "view of a larger storage", "is empty"))


def gathered(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def fsdp2(folder: Path) -> None:
    def shard(model):
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    steps_like_stock(shard, gathered, ("DTensor", "FSDP"))
    model = shard(models.build())
    for result in (decide.refuses_ranks(model), hf_rocm.prepare(model, force=True).__dict__[REPORT]["graphs"]["off"]):
        assert "FSDP2" in result, result


def fsdp2_by_accelerate(folder: Path) -> None:
    """Call the function with which `Accelerator.prepare` applies FSDP2, because `prepare` itself needs GPUs."""

    def shard(model):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            # With this setting, accelerate moves the model to the meta device before sharding.
            cpu_ram_efficient_loading=True,
        )
        accelerator: Any = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            device=torch.device("cpu"),
            mixed_precision="no",
            is_main_process=dist.get_rank() == 0,
        )
        return fsdp2_prepare_model(accelerator, model)

    steps_like_stock(shard, gathered, ("DTensor", "FSDP"))


if __name__ == "__main__":
    run((fsdp, fsdp2, fsdp2_by_accelerate), *sys.argv[1:])
