"""Compare stock and hf_rocm in calls of `generate`: greedy, returned outputs, beams, encoder-decoder models."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lib import never_slower
from lib.never_slower import Outcome

_RETURNS = {"return_dict_in_generate": True, "output_scores": True}


@dataclass(frozen=True)
class Call:
    """One call. model: a key of `_SHAPES`. new: the number of new tokens per row. arguments: arguments of generate."""

    name: str
    model: str
    new: int = 64
    arguments: dict[str, Any] = field(default_factory=dict)


CALLS = (
    Call("greedy", "llama-1b"),
    Call("scores and cache returned", "llama-1b", arguments=_RETURNS),
    Call("4 beams", "llama-1b", arguments={"num_beams": 4}),
    Call("whisper-large-v3-turbo", "whisper-turbo", new=100),
    Call("bart-large", "bart-large"),
    Call("t5-large", "t5-large"),
)

_BART = {"encoder_attention_heads": 16, "decoder_attention_heads": 16, "d_model": 1024}
_WHISPER = {"encoder_attention_heads": 20, "decoder_attention_heads": 20, "d_model": 1280, "vocab_size": 51866}

# shape → (model class, config class, arguments of the config)
_SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-1b": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
    ),
    "whisper-turbo": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_WHISPER,
            "encoder_layers": 32,
            "decoder_layers": 4,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
            "num_mel_bins": 128,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "bart-large": (
        "BartForConditionalGeneration",
        "BartConfig",
        {**_BART, "encoder_layers": 12, "decoder_layers": 12, "forced_eos_token_id": None},
    ),
    "t5-large": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "decoder_start_token_id": 0},
    ),
}
_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "d_model": 64,
    "d_ff": 96,
    "num_heads": 2,
    "num_layers": 1,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_source_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def measure(
    calls: Sequence[Call], device: Any, *, rounds: int, progress: Callable[[str], None], tiny: bool
) -> Iterator[Outcome]:
    """Measure every call on one row. tiny: use models for a test, and three new tokens."""
    import torch

    import hf_rocm
    from hf_rocm.tools.bench.variants import silence

    built: tuple[str, Any, Any] | None = None
    for call in calls:
        progress(f"{call.name} …")
        if built is None or built[0] != call.model:
            built = None
            gc.collect()
            stock = _build(call.model, device, tiny)
            prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
            for model in (stock, prepared):
                silence(model)
            built = call.model, stock, prepared
        _, stock, prepared = built
        new = 3 if tiny else call.new
        arguments = {**_inputs(stock, device, tiny), **call.arguments, "max_new_tokens": new, "min_new_tokens": new}
        runs = [_run(model, arguments) for model in (stock, prepared)]
        dtype = next(stock.parameters()).dtype
        wrong = None
        for _ in range(3):  # afterwards, steps are recorded and compared
            expected, actual = (run() for run in runs)
            wrong = wrong or never_slower.unlike(expected, actual, None, dtype)
        seconds: list[list[float]] = [[], []]
        for turn in range(rounds):
            for side in (1, 0) if turn % 2 else (0, 1):
                with torch.no_grad():
                    seconds[side].append(never_slower.timed(runs[side], device))
        yield Outcome(call.name, tuple(seconds[0]), tuple(seconds[1]), wrong=wrong)


def _run(model: Any, arguments: dict[str, Any]) -> Callable[[], Any]:
    return lambda: model.generate(do_sample=False, **arguments)


def _build(shape: str, device: Any, tiny: bool) -> Any:
    import torch
    import transformers

    kind, config_name, sizes = _SHAPES[shape]
    if tiny:
        sizes = {**sizes, **{name: value for name, value in _TINY.items() if name in sizes or name.endswith("_id")}}
        sizes["max_source_positions"] = _TINY["max_source_positions"]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**sizes)
    with torch.device(device):
        model = getattr(transformers, kind)(config)
    return model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).eval()


def _inputs(model: Any, device: Any, tiny: bool) -> dict[str, Any]:
    import torch

    if hasattr(model.config, "num_mel_bins"):
        frames = 2 * model.config.max_source_positions
        shape = (1, model.config.num_mel_bins, frames)
        return {"input_features": torch.randn(shape, device=device, dtype=next(model.parameters()).dtype)}
    ids = torch.randint(3, model.config.vocab_size, (1, 8 if tiny else 512), device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
