"""Run by test_training.py in each of two processes: DDP with a prepared and a stock model.

Argument: a folder to save to. Each rank has a different batch, so that gradients are correct only if they were
averaged. Stock also runs in float64, for the tolerance.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import hf_rocm
from hf_rocm import ops
from tests.generation.conftest import make
from tests.tolerance import assert_run_as_good_as_eager
from tests.weights import models
from tests.weights.models import GROUPS, assert_matches_stock, assert_same_results, logits


def run(checks: tuple[Callable[[Path], None], ...], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        for check in checks:
            check(Path(folder))
            dist.barrier()
            if dist.get_rank() == 0:
                print(check.__name__, flush=True)
    finally:
        dist.destroy_process_group()


def batch(rank: int, length: int = 7) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def gradients(model, wrap, **data) -> dict[str, torch.Tensor]:
    """The gradients of one backward pass of the wrapped model, by parameter."""
    model.train()
    wrapped = wrap(model)
    wrapped(**(data or batch(dist.get_rank())), use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def equal_to_stock(build, change, wrap, **data):
    """Compare the gradients of the prepared model with stock's. The tolerance is derived from stock's own error.

    Returns the prepared model.
    """
    results, reference = [], change(build().double())
    prepared = change(hf_rocm.prepare(build(), force=True))
    for model in (prepared, change(build()), reference):
        results.append(gradients(model, wrap, **data))
    actual, eager, expected = results
    assert_run_as_good_as_eager(actual, eager, {name: value.double() for name, value in expected.items()}, least=1e-3)
    # Gradients are averaged, so they are equal on all ranks.
    for name, tensor in actual.items():
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor.contiguous())
        assert all(torch.equal(other, tensor) for other in others), name
    return prepared


def unchanged(model):
    return model


def plain(folder: Path) -> None:
    prepared = equal_to_stock(models.build, unchanged, DistributedDataParallel)
    alone = gradients(models.build(), unchanged)
    weight = "model.layers.0.mlp.up_proj.weight"
    assert not torch.allclose(alone[weight], prepared.get_parameter(weight).grad)
    for settings in ({"static_graph": True}, {"gradient_as_bucket_view": True}):
        equal_to_stock(
            models.build, unchanged, lambda model, options=settings: DistributedDataParallel(model, **options)
        )


def checkpointed(folder: Path) -> None:
    for reentrant in (False, True):

        def change(model, reentrant=reentrant):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
            return model

        counted = 0

        def count(*_):
            nonlocal counted
            counted += 1

        prepared = equal_to_stock(models.build, change, DistributedDataParallel)
        prepared.model.layers[0].self_attn.q_proj.register_forward_pre_hook(count)
        gradients(prepared, unchanged)
        # The layer runs a second time in the backward pass.
        assert counted == 2


def some_unused(folder: Path) -> None:
    """In 4.x, every expert is a module, and an expert that gets no tokens on a rank has no gradient on that rank."""
    few = batch(dist.get_rank(), length=2)

    def build():
        return make("mixtral", num_local_experts=8, num_experts_per_tok=2)

    def change(model):
        if next(model.parameters()).dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
            # PyTorch's grouped GEMM does not support float64.
            model.set_experts_implementation("eager")
        return model

    alone = build()
    reached = gradients(alone, unchanged, **few)
    if any("experts.7." in name for name, _ in alone.named_parameters()):
        assert len(reached) < len(list(alone.parameters()))
    equal_to_stock(build, change, lambda model: DistributedDataParallel(model, find_unused_parameters=True), **few)


def adapters(folder: Path) -> None:
    def adapt(model):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "gate_proj"], init_lora_weights=False)
        dtype = next(model.parameters()).dtype
        return peft.get_peft_model(model, config).to(dtype)

    adapted = equal_to_stock(models.build, adapt, DistributedDataParallel)
    assert all("lora" in name for name, parameter in adapted.named_parameters() if parameter.requires_grad)
    merged = adapted.merge_and_unload()
    merged.eval().requires_grad_(False)
    assert_matches_stock(hf_rocm.prepare(merged, force=True), GROUPS)


def trained_and_evaluated(folder: Path) -> None:
    """The fused weights are updated, and the saved checkpoint has stock's names and the trained weights."""
    prepared, stock = hf_rocm.prepare(models.build(), force=True), models.build()
    before = logits(prepared)
    for model in (prepared, stock):
        with torch.no_grad():
            # give the ranks different weights: the wrapper broadcasts those of rank 0
            model.model.layers[1].mlp.up_proj.weight.mul_(1 + dist.get_rank())
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            wrapped(**batch(dist.get_rank()), use_cache=False).loss.backward()
            optimizer.step()
        wrapped.eval()
    assert "while gradients are" in hf_rocm.explain(prepared).details()
    assert_matches_stock(prepared, GROUPS)
    assert not torch.allclose(logits(prepared), before, atol=0.1)
    with torch.no_grad(), ops.recording() as routes:
        wrapped = DistributedDataParallel(prepared)
        wrapped(input_ids=models.IDS, use_cache=False)
        explanation = hf_rocm.explain(wrapped)
    assert (
        [route.operation for route in routes].count("linear") == GROUPS == sum(part.fused for part in explanation.parts)
    )
    if dist.get_rank() == 0:
        wrapped.module.save_pretrained(folder / "trained")
        stock.save_pretrained(folder / "stock")
        saved = [LlamaForCausalLM.from_pretrained(folder / name).eval() for name in ("trained", "stock")]
        assert saved[0].state_dict().keys() == saved[1].state_dict().keys()
        assert_same_results(saved[0], models.stock_with_weights_of(prepared))


def by_trainer(folder: Path) -> None:
    """transformers' Trainer wraps the model itself, evaluates it unwrapped, and saves it."""
    rows = [{name: value[0] for name, value in batch(seed).items()} for seed in range(8)]
    results = []
    for kind in ("prepared", "stock", "float64"):
        model = models.build().to(torch.float64 if kind == "float64" else torch.float32)
        if kind == "prepared":
            hf_rocm.prepare(model, force=True)
        arguments = TrainingArguments(
            folder / kind,
            max_steps=2,
            per_device_train_batch_size=2,
            optim="sgd",
            learning_rate=0.5,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        assert type(trainer.model_wrapped) is DistributedDataParallel
        with ops.recording() as routes:
            loss = trainer.evaluate()["eval_loss"]
        fused = [route.operation for route in routes].count("linear")
        assert fused == (GROUPS if kind == "prepared" else 0)
        trainer.save_model(folder / kind)
        results.append({"loss": torch.tensor(loss, dtype=model.dtype), **model.state_dict()})
    actual, eager, expected = results
    assert_run_as_good_as_eager(actual, eager, expected, least=1e-3)
    if dist.get_rank() == 0:
        saved = LlamaForCausalLM.from_pretrained(folder / "prepared").state_dict()
        assert all(torch.equal(value, actual[name]) for name, value in saved.items())


if __name__ == "__main__":
    run((plain, checkpointed, some_unused, adapters, trained_and_evaluated, by_trainer), *sys.argv[1:])
