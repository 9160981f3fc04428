"""Train a small Llama-like model from scratch, on text that every Python installation contains.

With it, the tests and most of the demo need no download of a trained checkpoint. The text is the Python language
reference that `help()` shows, and the tokenizer is a BPE trained on it.

    python scripts/train_tiny.py OUT [--steps 800]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

# Grouped-query attention (Hkv < H), and a head dim that the kernels support.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
VOCABULARY = 1024
# The highest learning rate.
PEAK = 6e-3
END = "<|end|>"

# The arguments are the step, the number of steps and the loss.
Progress = Callable[[int, int, float], None]


def train(
    out: Path, *, steps: int, batch: int = 8, length: int = 128, seed: int = 0, progress: Progress | None = None
) -> float:
    """Write a safetensors checkpoint with its tokenizer to `out`. Returns the mean loss (nats) of the last 20 steps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    tokenizer = learn_tokenizer()
    end = tokenizer.convert_tokens_to_ids(END)
    tokens = torch.tensor([token for page in pages() for token in [*tokenizer(page)["input_ids"], end]])

    config = LlamaConfig(
        **SHAPE, vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end, pad_token_id=end, attention_dropout=0.0
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * learning_rate(step, steps)
        starts = torch.randint(len(tokens) - length, (batch,))
        rows = torch.stack([tokens[start : start + length] for start in starts.tolist()])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if progress is not None:
            progress(step + 1, steps, sum(losses[-20:]) / len(losses[-20:]))

    model.eval()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return float(sum(losses[-20:]) / len(losses[-20:]))


def learning_rate(step: int, steps: int) -> float:
    """The learning rate relative to the peak: a linear warm-up over a tenth of the steps, then a half cosine to 0.1."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def pages() -> list[str]:
    """The language reference's pages, as `help()` shows them."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return [topics[name].strip() + "\n" for name in sorted(topics)]


def learn_tokenizer() -> Any:
    """A byte-level BPE trained on the pages, wrapped for transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(pages(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END)


def progress_bar(width: int = 28) -> Progress:
    """Return a function that shows progress: on a terminal as a bar that is redrawn, elsewhere as one line for the
    first step and one per tenth of the steps."""
    began, live = time.monotonic(), sys.stdout.isatty()

    def show(step: int, steps: int, loss: float) -> None:
        seconds = time.monotonic() - began
        text = f"step {step:>4}/{steps}  loss {loss:5.3f}  {seconds:4.0f} s"
        if live:
            full = width * step // steps
            left = (steps - step) * seconds / step
            bar = "━" * full + "\x1b[2m" + "━" * (width - full) + "\x1b[0m"
            print(f"\r  {bar}  {text}  {left:3.0f} s left ", end="\n" if step == steps else "", flush=True)
        elif step == 1 or step == steps or step * 10 // steps != (step - 1) * 10 // steps:
            print(f"  {text}", flush=True)

    return show


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama-type model on the Python language reference.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    train(arguments.out, steps=arguments.steps, progress=progress_bar())


if __name__ == "__main__":
    main()
