"""The demo's worker process: it runs a model, or compares earlier runs, and writes the results to a folder.

    demo_worker.py generate MODE CHECKPOINT OUT     greedy text and teacher-forced logits, fp32 and bf16
    demo_worker.py embed MODE CHECKPOINT OUT        sentence embeddings, fp32
    demo_worker.py judge generate|embed CHECKPOINT OUT RUN …    compare every RUN with the first

MODE is `stock` (transformers, with or without installed overlays) or `loader` (hf_rocm.from_pretrained, forced).
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

PROMPT = 'The "with" statement'
NEW_TOKENS = 96
ROUNDS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SENTENCES = (
    "How do I undo the last commit?",
    "Reverting the most recent change in version control.",
    "The cat sleeps on the warm windowsill.",
    "A kitten naps in the sun.",
    "A batch of one is limited by memory bandwidth.",
)


def generate(mode: str, checkpoint: str, out: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    result: dict[str, Any] = {"prompt": PROMPT}
    tensors = {}
    for name, dtype in DTYPES.items():
        began = time.perf_counter()
        model = load(mode, checkpoint, dtype)
        result[name] = {"load": time.perf_counter() - began}
        tensors[name] = logits(model, checkpoint)
        with recording(mode) as routes:
            tokens = greedy(model, prompt)
        result[name]["tokens"] = tokens[0, prompt.shape[1] :].tolist()
        result[name]["text"] = tokenizer.decode(tokens[0])
        if name == "fp32":
            result[name] |= {"first": timed(greedy, model, prompt, 1), "all": timed(greedy, model, prompt)}
            result |= account(mode, model, routes)
    save(out, result, tensors)


def embed(mode: str, checkpoint: str, out: Path) -> None:
    import transformers  # noqa: F401 (before the clock starts)

    began = time.perf_counter()
    model = load(mode, checkpoint, torch.float32)
    result: dict[str, Any] = {"sentences": SENTENCES, "fp32": {"load": time.perf_counter() - began}}
    with recording(mode) as routes:
        tensors = {"fp32": embeddings(model, checkpoint)}
    result["fp32"]["all"] = timed(embeddings, model, checkpoint)
    result["similarity"] = (tensors["fp32"] @ tensors["fp32"].T).tolist()
    save(out, result | account(mode, model, routes), tensors)


def judge(command: str, checkpoint: str, out: Path, runs: list[Path]) -> None:
    """Compare every run with the first one and with float64, and compute the tolerance of every dtype.

    The tolerance is twice the error of transformers' eager path in that dtype against float64, plus one rounding step
    of the largest value.
    """
    from hf_rocm.tolerance import allowed_error

    measure: Callable[[Any, str], torch.Tensor] = logits if command == "generate" else embeddings
    saved = [torch.load(run / "tensors.pt") for run in runs]
    verdict: dict[str, Any] = {}
    for name in saved[0]:
        dtype = DTYPES[name]
        exact = measure(in_float64(load("stock", checkpoint, dtype)), checkpoint)
        eager = measure(load("stock", checkpoint, dtype, attn_implementation="eager"), checkpoint)
        eager_error = (eager.double() - exact).abs().max().item()
        largest = exact.abs().max().item()
        reference = saved[0][name].double()
        verdict[name] = {
            "eager_error": eager_error,
            "step": torch.finfo(dtype).eps * largest,
            "allowed": allowed_error(eager_error, dtype, largest),
            "difference": [(tensors[name].double() - reference).abs().max().item() for tensors in saved],
            "error": [(tensors[name].double() - exact).abs().max().item() for tensors in saved],
            "equal": [torch.equal(tensors[name], saved[0][name]) for tensors in saved],
            "finite": [bool(torch.isfinite(tensors[name]).all()) for tensors in saved],
        }
    save(out, verdict, {})


def load(mode: str, checkpoint: str, dtype: torch.dtype, **arguments: Any) -> Any:
    if mode == "loader":
        import hf_rocm

        return hf_rocm.from_pretrained(checkpoint, force=True, dtype=dtype, **arguments).eval()
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    decoder = "CausalLM" in AutoConfig.from_pretrained(checkpoint).architectures[0]
    auto: Any = AutoModelForCausalLM if decoder else AutoModel
    return auto.from_pretrained(checkpoint, dtype=dtype, **arguments).eval()


def greedy(model: Any, prompt: torch.Tensor, tokens: int = NEW_TOKENS) -> Any:
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens)


@torch.inference_mode()
def logits(model: Any, checkpoint: str) -> torch.Tensor:
    """Teacher-forced logits for the first page of the training text, up to 256 tokens. All runs use the same tokens."""
    from train_tiny import pages
    from transformers import AutoTokenizer

    rows = AutoTokenizer.from_pretrained(checkpoint)(pages()[0], return_tensors="pt")["input_ids"][:, :256]
    return model(input_ids=rows).logits


@torch.inference_mode()
def embeddings(model: Any, checkpoint: str) -> torch.Tensor:
    """The normalised mean over unmasked tokens, as sentence-transformers computes it for this model."""
    from transformers import AutoTokenizer

    batch = AutoTokenizer.from_pretrained(checkpoint)(list(SENTENCES), padding=True, return_tensors="pt")
    states = model(**batch).last_hidden_state
    weights = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


def in_float64(model: Any) -> Any:
    """The model in float64, including Llama's norm, which otherwise uses float32."""
    for module in model.double().modules():
        if type(module).__name__ == "LlamaRMSNorm":
            scale, epsilon = module.weight, module.variance_epsilon
            module.forward = lambda x, w=scale, e=epsilon: w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + e)
    return model


def timed(call: Callable[..., object], *arguments: object) -> dict[str, float]:
    """The median, the fastest and the slowest time of a few rounds after a warm-up, in seconds."""
    call(*arguments)
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call(*arguments)
        seconds.append(time.perf_counter() - began)
    return {"median": statistics.median(seconds), "fastest": min(seconds), "slowest": max(seconds)}


def recording(mode: str) -> AbstractContextManager[list[Any]]:
    """Record the routes of hf_rocm's operations. If a run with stock classes did not import them, the list is empty,
    and nothing is imported."""
    if mode != "loader" and "hf_rocm.ops" not in sys.modules:
        return nullcontext([])
    from hf_rocm import ops

    return ops.recording()


def account(mode: str, model: Any, routes: list[Any]) -> dict[str, Any]:
    """The facts about a run: the model, the device, the version of torch, two of the routes of attention and, for the
    loader, the explanation."""
    attention = sorted({(route.tier, route.shapes[:3]) for route in routes if route.operation == "attention"}, key=str)
    facts: dict[str, Any] = {
        "key_value_heads": getattr(model.config, "num_key_value_heads", model.config.num_attention_heads),
        "ops_imported": "hf_rocm.ops" in sys.modules,
        "attention_calls": sum(route.operation == "attention" for route in routes),
        "attention_shapes": attention[:1] + attention[-1:],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": str(model.device),
        "parameters": model.num_parameters(),
    }
    if mode == "loader":
        import hf_rocm

        # Disable gradients as generate does: with gradients enabled, trainable weights are not fused.
        with torch.no_grad():
            explanation = hf_rocm.explain(model)
        facts |= {"explain": str(explanation), "explanation": explanation.to_dict()}
    return facts


def save(out: Path, result: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    # ru_maxrss is in bytes on macOS, and in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    result["peak_memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    torch.save(tensors, out / "tensors.pt")
    (out / "result.json").write_text(json.dumps(result, indent=1))


def main() -> None:
    command, mode, checkpoint, out, *others = sys.argv[1:]
    if command == "judge":
        judge(mode, checkpoint, Path(out), [Path(run) for run in others])
    else:
        {"generate": generate, "embed": embed}[command](mode, checkpoint, Path(out))


if __name__ == "__main__":
    main()
