"""Compare stock and hf_rocm in calls to `generate`: greedy, returned outputs, beams, drafts, encoder-decoder models."""

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
    """One call. model: a shape of `hf-rocm bench` or a key of `_SHAPES`. new: the number of new tokens per row.
    arguments: arguments of generate.

    repeats: whether the layers of the model add zeros, so that it repeats the last token of the prompt, and the number
    of accepted drafts is known. prompt: `random`, or, for lookups of n-grams of one token: `one token` (lookups draft
    the same token, so all drafts are accepted), `one, then others` (only the first draft is accepted) or `every other`
    (the first draft is a random token, so all drafts are rejected). assistant: whether the first layers of the model
    are used as the assistant model.
    """

    name: str
    model: str
    new: int = 64
    arguments: dict[str, Any] = field(default_factory=dict)
    repeats: bool = False
    prompt: str = "random"
    assistant: bool = False


_LOOKUP = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1}

CALLS = (
    Call("greedy", "llama-1b"),
    Call("scores and cache returned", "llama-1b", arguments=_RETURNS),
    Call("4 beams", "llama-1b", arguments={"num_beams": 4}),
    Call("greedy, repeated token", "llama-1b", repeats=True),
    Call("lookup, all rejected", "llama-1b", arguments=_LOOKUP, repeats=True, prompt="every other"),
    Call("lookup, one of five accepted", "llama-1b", arguments=_LOOKUP, repeats=True, prompt="one, then others"),
    Call("lookup, all accepted", "llama-1b", arguments=_LOOKUP, repeats=True, prompt="one token"),
    Call("assistant, all accepted", "llama-1b", repeats=True, assistant=True),
    Call("whisper-large-v3-turbo", "whisper-turbo", new=100),
    Call("bart-large", "bart-large"),
    Call("t5-large", "t5-large"),
    Call("greedy, 8B", "llama-8b"),
    Call("4 beams, 8B", "llama-8b", arguments={"num_beams": 4}),
)
# prompt → the positions of its repeated token, besides the last position
_REPEATED = {"one token": slice(None), "one, then others": slice(2), "every other": slice(None, None, 2)}
# The number of tokens that an assistant drafts in each round.
DRAFTED = 5
ASSISTANT_LAYERS = 2

_BART = {"encoder_attention_heads": 16, "decoder_attention_heads": 16, "d_model": 1024}
_WHISPER = {"encoder_attention_heads": 20, "decoder_attention_heads": 20, "d_model": 1280, "vocab_size": 51866}

# shape → (model class, config class, arguments of the config)
_SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
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
    """Measure every call with a batch size of 1. tiny: use tiny models and three new tokens, for a test."""
    import torch

    import hf_rocm
    from hf_rocm.tools.bench.variants import silence

    built: tuple[tuple[str, bool], Any, Any] | None = None
    for call in calls:
        progress(f"{call.name} …")
        if built is None or built[0] != (call.model, call.repeats):
            built = None
            gc.collect()
            stock = _build(call.model, device, tiny)
            if call.repeats:
                _silence_layers(stock)
            prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
            for model in (stock, prepared):
                silence(model)
            built = (call.model, call.repeats), stock, prepared
        _, stock, prepared = built
        new = 3 if tiny else call.new
        arguments = {**_inputs(call, stock, device, tiny), **call.arguments}
        arguments |= {"max_new_tokens": new, "min_new_tokens": new}
        assistants: list[dict[str, Any]] = [{}, {}]
        if call.assistant:
            assistants = [{"assistant_model": _assistant(stock)} for _ in range(2)]
            hf_rocm.prepare(assistants[1]["assistant_model"], force=True)
        runs = [_run(model, {**arguments, **more}) for model, more in zip((stock, prepared), assistants, strict=True)]
        dtype = next(stock.parameters()).dtype
        wrong = None
        # After these calls, the steps have been recorded and the recordings checked.
        for _ in range(3):
            expected, actual = (run() for run in runs)
            wrong = wrong or never_slower.mismatch(expected, actual, None, dtype)
            if call.repeats and not torch.equal(expected, actual):
                wrong = wrong or "its tokens differ from stock's"
        seconds: list[list[float]] = [[], []]
        for turn in range(rounds):
            for side in (1, 0) if turn % 2 else (0, 1):
                with torch.no_grad():
                    seconds[side].append(never_slower.timed(runs[side], device))
        yield Outcome(call.name, tuple(seconds[0]), tuple(seconds[1]), wrong=wrong)


def _run(model: Any, arguments: dict[str, Any]) -> Callable[[], Any]:
    return lambda: model.generate(do_sample=False, **arguments)


def _build(name: str, device: Any, tiny: bool) -> Any:
    import torch
    import transformers

    from hf_rocm.tools.bench import shapes

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _SHAPES:
        return shapes.build("small" if tiny else name, device=device, dtype=dtype)
    kind, config_name, sizes = _SHAPES[name]
    if tiny:
        sizes = {**sizes, **{name: value for name, value in _TINY.items() if name in sizes or name.endswith("_id")}}
        sizes["max_source_positions"] = _TINY["max_source_positions"]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**sizes)
    with torch.device(device):
        model = getattr(transformers, kind)(config)
    return model.to(dtype).eval()


def _silence_layers(model: Any) -> None:
    """Make every layer add zeros: with tied embeddings, the largest logit is then that of the last token."""
    import torch

    model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()


def _assistant(model: Any) -> Any:
    """A copy of the model with only its first layers, which drafts the same number of tokens in every round."""
    assistant = copy.deepcopy(model)
    assistant.model.layers = assistant.model.layers[:ASSISTANT_LAYERS]
    assistant.config.num_hidden_layers = ASSISTANT_LAYERS
    kinds = getattr(assistant.config, "layer_types", None)
    if kinds is not None:
        assistant.config.layer_types = kinds[:ASSISTANT_LAYERS]
    config = assistant.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = DRAFTED, "constant"
    return assistant


def _inputs(call: Call, model: Any, device: Any, tiny: bool) -> dict[str, Any]:
    import torch

    if hasattr(model.config, "num_mel_bins"):
        frames = 2 * model.config.max_source_positions
        shape = (1, model.config.num_mel_bins, frames)
        return {"input_features": torch.randn(shape, device=device, dtype=next(model.parameters()).dtype)}
    ids = torch.randint(4, model.config.vocab_size, (1, 8 if tiny else 512), device=device)
    if call.prompt != "random":
        ids[:, _REPEATED[call.prompt]] = ids[:, -1:] = 3
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
