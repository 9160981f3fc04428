"""Check that hf_rocm is not slower than stock in cases that it serves, mostly without recordings.

For example, hooks, forwards of other libraries or returned hidden states prevent decode steps from being recorded. With
the remaining changes (fused weights, kernels, inputs prepared once), no case may be slower than stock.
"""

from __future__ import annotations

import copy
import gc
import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import MethodType
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Case:
    """One situation. change: a user's or a library's change to both models. run: `generate`, `forward` or `train`.
    arguments: arguments of generate. graphs: the argument of `prepare`. needs: a package that the case requires."""

    name: str
    run: str = "generate"
    batch: int = 1
    change: Callable[[Any], None] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    graphs: bool | None = None
    model: str = "decoder"
    needs: str | None = None


class Outcome(NamedTuple):
    """The seconds per call on both sides, by round, or the reason why the case was not measured.

    wrong: the error of hf_rocm's result, or None.
    """

    case: str
    stock: tuple[float, ...] = ()
    prepared: tuple[float, ...] = ()
    left_out: str | None = None
    wrong: str | None = None

    @property
    def ratio(self) -> float:
        """The speed-up of hf_rocm: the ratio of the medians."""
        return statistics.median(self.stock) / statistics.median(self.prepared)

    @property
    def slower(self) -> bool:
        """Whether hf_rocm is slower than stock by more than the spread: its first quartile is above stock's third."""
        if self.left_out is not None:
            return False
        return _quartiles(self.prepared)[0] > _quartiles(self.stock)[2]


def hooked(model: Any) -> None:
    """A user's hook on every MLP."""
    for module in model.modules():
        if type(module).__name__.endswith("MLP"):
            module.register_forward_hook(_no_op)


def patched(model: Any) -> None:
    """Replace the forward of every norm and every MLP of a decoder with a Python function, as libraries do."""
    for module in model.modules():
        for ending, forward in (("RMSNorm", _norm), ("MLP", _mlp)):
            if type(module).__name__.endswith(ending):
                module.forward = MethodType(forward, module)


def liger(model: Any) -> None:
    """Apply Liger-Kernel to the modules of a model."""
    monkey_patch: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    apply = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    apply(model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)


CASES = (
    *(Case(f"graphs=False, batch {batch}", batch=batch, graphs=False) for batch in (1, 8)),
    Case("output_hidden_states", arguments={"return_dict_in_generate": True, "output_hidden_states": True}),
    Case("beams, graphs=False", arguments={"num_beams": 2}, graphs=False),
    *(Case(f"hooks on modules, batch {batch}", batch=batch, change=hooked) for batch in (1, 8)),
    Case("forwards of another library", change=patched),
    *(Case(f"Liger-Kernel, batch {batch}", batch=batch, change=liger, needs="liger_kernel") for batch in (1, 8)),
    *(Case(f"prefill, batch {batch}", run="forward", batch=batch) for batch in (1, 8)),
    *(Case(f"encoder, batch {batch}", run="forward", batch=batch, model="encoder", graphs=False) for batch in (1, 8)),
    Case("training step", run="train", batch=2),
    Case("training step, hooks on modules", run="train", batch=2, change=hooked),
)


@dataclass(frozen=True)
class Size:
    """The sizes of models and calls: hidden size, layers, prompt, and new tokens."""

    hidden: int = 256
    layers: int = 2
    prompt: int = 32
    new: int = 8


# SMALL is for a CPU, where it takes seconds. LARGE is for a GPU in bf16, where the host and the kernels both take time.
SMALL, LARGE = Size(), Size(hidden=2048, layers=8, prompt=512, new=64)


def measure(
    cases: Sequence[Case], device: Any, size: Size, *, rounds: int, progress: Callable[[str], None]
) -> Iterator[Outcome]:
    """Measure every case: warm up both sides, compare them, and then time them alternately."""
    for case in cases:
        progress(f"{case.name} …")
        if case.needs is not None and find_spec(case.needs) is None:
            yield Outcome(case.name, left_out=f"{case.needs} is not installed")
            continue
        if case.needs is not None and device.type != "cuda":
            yield Outcome(case.name, left_out=f"{case.needs} only has kernels for GPUs")
            continue
        yield _measure(case, device, size, rounds)
        gc.collect()


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per case, in milliseconds per call."""
    return "\n".join([f"{'case':<34}{'stock ms':>22}{'hf_rocm ms':>22}{'times':>8}", *map(row, outcomes)])


def row(outcome: Outcome) -> str:
    """The table's line for one case."""
    if outcome.left_out is not None:
        return f"{outcome.case:<34}not measured: {outcome.left_out}"
    mark = "  SLOWER" if outcome.slower else ""
    mark = f"  WRONG: {outcome.wrong}" if outcome.wrong is not None else mark
    return f"{outcome.case:<34}{_span(outcome.stock):>22}{_span(outcome.prepared):>22}{outcome.ratio:>8.2f}{mark}"


def _measure(case: Case, device: Any, size: Size, rounds: int) -> Outcome:
    import torch

    import hf_rocm
    from hf_rocm.tools.bench.variants import silence

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stock = _build(case.model, size).to(device=device, dtype=dtype)
    stock.train(case.run == "train")
    prepared, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    hf_rocm.prepare(prepared, force=True, graphs=case.graphs)
    for model in (stock, prepared):
        silence(model)
        if case.change is not None:
            case.change(model)
    ids = torch.randint(3, stock.config.vocab_size, (case.batch, size.prompt), device=device)
    calls = [_call(case, model, ids, size) for model in (stock, prepared)]
    reference = None if case.run == "generate" else _call(case, exact, ids, size)()
    wrong = None
    # After these calls, the steps that can be recorded have been recorded and compared.
    for _ in range(3):
        expected, actual = (call() for call in calls)
        wrong = wrong or mismatch(expected, actual, reference, dtype)
    seconds: list[list[float]] = [[], []]
    for turn in range(rounds):
        for side in (1, 0) if turn % 2 else (0, 1):
            seconds[side].append(timed(calls[side], device))
    return Outcome(case.name, tuple(seconds[0]), tuple(seconds[1]), wrong=wrong)


def _build(kind: str, size: Size) -> Any:
    import transformers

    arguments: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": size.hidden,
        "intermediate_size": size.hidden * 3,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.hidden // 64,
        "max_position_embeddings": 2048,
    }
    if kind == "encoder":
        return transformers.BertModel(transformers.BertConfig(**arguments)).eval()
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**arguments, num_key_value_heads=max(1, size.hidden // 128))
    ).eval()


def _call(case: Case, model: Any, ids: Any, size: Size) -> Callable[[], Any]:
    import torch

    def generate() -> Any:
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=size.new, min_new_tokens=size.new, **case.arguments
        )

    def forward() -> Any:
        with torch.inference_mode():
            return model(ids)[0]

    def train() -> Any:
        model.zero_grad()
        outputs = model(ids, labels=ids)
        outputs.loss.backward()
        return outputs.logits.detach()

    return {"generate": generate, "forward": forward, "train": train}[case.run]


def mismatch(expected: Any, actual: Any, reference: Any, dtype: Any) -> str | None:
    """The error of hf_rocm's result, in a sentence, or None.
    reference: the float64 result; None for tokens. In 16 bits, the logits of two tokens may be equal within rounding,
    so only the number of tokens is compared.
    """
    import torch

    from hf_rocm.tolerance import allowed_error

    expected, actual = (getattr(result, "sequences", result) for result in (expected, actual))
    if expected.shape != actual.shape:
        return f"its output is {list(actual.shape)}, not {list(expected.shape)}"
    if reference is None:
        return None if dtype.itemsize < 4 or torch.equal(expected, actual) else "its tokens differ from stock's"
    eager, error = (float((result.double() - reference).abs().max()) for result in (expected, actual))
    allowed = allowed_error(eager, dtype, float(reference.abs().max()))
    return None if error <= allowed else f"the error of its output is {error:.3g}, but only {allowed:.3g} is allowed"


def timed(call: Callable[[], Any], device: Any) -> float:
    from hf_rocm.tools.bench.clock import now

    gc.collect()
    began = now(device)
    call()
    return now(device) - began


def _quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, median, high


def _span(seconds: Sequence[float]) -> str:
    low, median, high = (1000 * quartile for quartile in _quartiles(seconds))
    return f"{median:.2f} ({low:.2f}–{high:.2f})"


def _no_op(module: Any, arguments: Any, output: Any) -> None:
    """A hook that changes nothing."""


def _norm(self: Any, x: Any) -> Any:
    wide = x.float()
    return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()).to(x.dtype)


def _mlp(self: Any, x: Any) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
