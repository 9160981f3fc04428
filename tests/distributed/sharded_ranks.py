"""Run by test_tensor_parallel.py in each of two ranks: models that transformers shards, prepared and stock.

Arguments: a folder of checkpoints, one per model, and the folder where the first rank saves models. Prints a line of
JSON per model: check → error, or "".
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

import hf_rocm
from hf_rocm import ops, patches
from hf_rocm.layers import grouped_linear
from hf_rocm.layers.grouped_linear import live
from hf_rocm.layers.weight_group import MOVED, SLOT, is_idle
from hf_rocm.loading.prepare import REPORT
from hf_rocm.overlay import bind
from hf_rocm.weights.sharded import Shards
from hf_rocm.weights.tensor_parallel import local
from tests import snapshot
from tests.coverage.inputs import tokens

transformers.logging.set_verbosity_error()


def groups(model):
    """Every group of layers that an overlay fuses: (module, names)."""
    return [
        (module, binding.fuses)
        for module in model.modules()
        if (binding := bind.binding_of(module)) is not None and binding.fuses
    ]


def run(model):
    """Return the logits of a prompt and of a step with its cache, and the tokens of a greedy `generate` call."""
    with torch.no_grad():
        first = model(input_ids=tokens(2, 9), use_cache=True)
        logits = first.logits.clone()
        second = model(input_ids=tokens(2, 1, seed=1), past_key_values=first.past_key_values, use_cache=True)
    generated = model.generate(tokens(2, 5), max_new_tokens=12, do_sample=False)
    return logits, second.logits, generated


def same(actual, expected):
    for one, other in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    assert actual[2].tolist() == expected[2].tolist()


class Sharded:
    """A stock and a prepared model, both sharded by transformers, and the stock model without sharding."""

    def __init__(self, checkpoint: Path, out: Path) -> None:
        self.checkpoint, self.out = checkpoint, out
        kind = getattr(transformers, json.loads((checkpoint / "config.json").read_text())["architectures"][0])
        self.kind = kind
        # up to at least 5.19, transformers selects sdpa for gemma2, which omits the softcap
        self.arguments = {"attn_implementation": "eager"} if checkpoint.name == "gemma2" else {}
        self.stock = kind.from_pretrained(checkpoint, tp_plan="auto", **self.arguments).eval()
        self.model = self.prepared().eval()
        self.unsharded = kind.from_pretrained(checkpoint, **self.arguments).eval()

    def prepared(self):
        return hf_rocm.from_pretrained(self.checkpoint, tp_plan="auto", force=True, graphs=False, **self.arguments)

    def returns_the_same_results_as_stock(self):
        expected = run(self.stock)
        same(run(self.model), expected)
        assert run(self.unsharded)[2].tolist() == expected[2].tolist()

    def runs_one_gemm_per_group(self):
        with torch.no_grad():
            result = groups(self.model)
            assert result and all(live(module) is not None for module, _ in result)
            rows = {len(live(module).weight) for module, _ in result}
        unsharded_rows = {
            sum(module._modules[name].weight.shape[0] for name in names) for module, names in groups(self.unsharded)
        }
        assert sorted(rows) == sorted(rows_of_group // 2 for rows_of_group in unsharded_rows)
        with ops.recording() as routes, torch.no_grad(), counted(result) as hits:
            self.model(input_ids=tokens(2, 9))
        assert hits == len(result), (hits, len(result))
        assert "linear" in {route.operation for route in routes}
        assert not self.model.__dict__[REPORT]["skipped"]
        explanation = hf_rocm.explain(self.model)
        assert "DTensor" not in explanation.details()
        assert not any(part.theirs for part in explanation.parts), "the wrapper of transformers bypasses hf_rocm"

    def can_be_traced(self):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        for parameter in self.model.parameters():
            mode.from_tensor(parameter)
        if self.checkpoint.name != "llama":
            # Tracing takes seconds, so only one model is traced.
            return
        with torch.no_grad():
            traced = torch.compile(self.model, backend="eager")(input_ids=tokens(2, 9), use_cache=False).logits
            expected = self.stock(input_ids=tokens(2, 9), use_cache=False).logits
            torch.testing.assert_close(traced, expected, rtol=2e-5, atol=2e-5)

    def keeps_gradients(self):
        losses = []
        for model in (self.stock, self.model):
            model.zero_grad()
            loss = model(input_ids=tokens(2, 9), labels=tokens(2, 9), use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
        for (name, one), other in zip(self.stock.named_parameters(), self.model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), name
            if one.grad is not None:
                torch.testing.assert_close(plain(other.grad), plain(one.grad), msg=name)
        self.stock.zero_grad(), self.model.zero_grad()

    def uses_weights_that_were_changed_in_place(self):
        module, names = groups(self.model)[0]
        twin = stock_module(self.stock, self.model, module)
        with torch.no_grad():
            for variant in (module, twin):
                variant._modules[names[0]].weight.mul_(0.5)
            assert live(module) is not None
        same(run(self.model), run(self.stock))

    def does_not_use_a_group_with_a_replaced_weight(self):
        module, names = groups(self.model)[-1]
        twin = stock_module(self.stock, self.model, module)
        for variant in (module, twin):
            linear = variant._modules[names[0]]
            linear.weight = torch.nn.Parameter(linear.weight.detach() * 2)
        owner = local(module._modules[names[0]].weight).detach()
        with torch.no_grad():
            assert "replaced or moved" in Shards.why_not(module, names) and type(module.__dict__[SLOT]) is Shards
            assert live(module) is None and is_idle(module.__dict__[SLOT], MOVED)
            assert "replaced or moved" in Shards.why_not(module, names)
        # a weight that is not in the group is not moved, because it may be a view of other memory, as in FSDP2
        assert local(module._modules[names[0]].weight).data_ptr() == owner.data_ptr()
        same(run(self.model), run(self.stock))
        hf_rocm.prepare(self.model, force=True, graphs=False)
        with torch.no_grad():
            assert live(module) is not None
        same(run(self.model), run(self.stock))

    def is_fused_again_after_a_conversion(self):
        model = self.prepared().double()
        with torch.no_grad():
            block = [live(module) for module, _ in groups(model)]
        assert all(group is not None and group.weight.dtype == torch.float64 for group in block)
        # Stock's experts don't support float64.
        if self.checkpoint.name != "mixtral":
            twin = self.kind.from_pretrained(self.checkpoint, tp_plan="auto", **self.arguments).double()
            same(run(model), run(twin))

    def saves_the_same_weights_as_stock(self):
        folder = self.out / self.checkpoint.name
        self.prepared().save_pretrained(folder, is_main_process=dist.get_rank() == 0)
        dist.barrier()
        again = self.kind.from_pretrained(folder).eval()
        for (name, one), (other_name, other) in zip(
            again.state_dict().items(), self.unsharded.state_dict().items(), strict=True
        ):
            assert name == other_name and torch.equal(one, other), name

    def is_stock_after_restore(self):
        hf_rocm.restore(self.model)
        for module in self.model.modules():
            assert not [name for name in module.__dict__ if name.startswith("_hf_rocm") and name != bind.MODE]
        assert SLOT not in self.model.model.layers[0].__dict__
        same(run(self.model), run(self.stock))

    def leaves_no_references(self):
        """transformers, torch and accelerate keep no references to hf_rocm, except those of the compiler.

        The compiler keeps references in its caches, and adds imported modules to the globals of compiled code.
        """
        hf_rocm.deactivate()
        gc.collect()
        patches.sweep()
        left = [
            place
            for place in snapshot.references()
            if not place.startswith(snapshot.CACHES) and not place.rpartition(".")[2].startswith("__import_")
        ]
        assert not left, left


def plain(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def stock_module(stock, prepared, module):
    """The stock module with the same name as this module of the prepared model."""
    name = next(name for name, named_module in prepared.named_modules() if named_module is module)
    return stock.get_submodule(name)


class counted:
    """Count the lookups that return a fused group of sharded weights."""

    def __init__(self, result):
        self.result, self.hits = result, 0

    def __enter__(self):
        self.live = grouped_linear.live

        def live(module):
            group = self.live(module)
            self.hits += isinstance(group, Shards)
            return group

        grouped_linear.live = live
        return self

    def __exit__(self, *_):
        grouped_linear.live = self.live

    def __eq__(self, other):
        return self.hits == other

    def __repr__(self):
        return str(self.hits)


CHECKS = (
    Sharded.returns_the_same_results_as_stock,
    Sharded.runs_one_gemm_per_group,
    Sharded.can_be_traced,
    Sharded.keeps_gradients,
    Sharded.uses_weights_that_were_changed_in_place,
    Sharded.does_not_use_a_group_with_a_replaced_weight,
    Sharded.is_fused_again_after_a_conversion,
    Sharded.saves_the_same_weights_as_stock,
    Sharded.is_stock_after_restore,
    Sharded.leaves_no_references,
)


def main(checkpoints: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for checkpoint in sorted(Path(checkpoints).iterdir()):
        results = {}
        models = Sharded(checkpoint, Path(out))
        for check in CHECKS:
            try:
                check(models)
                results[check.__name__] = ""
            except Exception:  # noqa: BLE001  a failed check must not stop the others
                results[check.__name__] = traceback.format_exc()
        print(json.dumps({checkpoint.name: results}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
