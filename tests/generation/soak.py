"""Random calls of `generate`: batch size, length, padding, sampling, logits processors, stopping, caches, outputs."""

from __future__ import annotations

import random

import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

import hf_rocm
from hf_rocm.generation import decide
from hf_rocm.generation.state import known
from tests.generation.conftest import assistant_of, prompt

_STATIC = Version(transformers.__version__) >= Version("4.54")
# stock's caches with sliding windows can't remove drafts
_WINDOWS_FORGET_NOTHING = Version(transformers.__version__) < Version("5.14")


def call(number, *, device="cpu", longest=24):
    """Returns the keyword arguments of a random call, and whether it also passes a cache. number: the seed."""
    pick = random.Random(number)
    rows, length = pick.choice((1, 1, 2, 3, 4)), pick.randint(1, longest)
    inputs = prompt(rows=rows, length=length, seed=number, padded=pick.choice((0, 0, length // 2)))
    arguments = {name: tensor.to(device) for name, tensor in inputs.items()}
    arguments |= {"max_new_tokens": pick.randint(2, longest), "pad_token_id": 0}
    arguments["do_sample"] = pick.random() < 0.4
    if arguments["do_sample"]:
        arguments |= {"temperature": pick.choice((0.7, 1.3)), "top_k": pick.choice((5, 20)), "top_p": 0.95}
    if pick.random() < 0.3:
        arguments["repetition_penalty"] = 1.3
    if pick.random() < 0.4:
        arguments["eos_token_id"] = pick.sample(range(3, 61), 4)
    if pick.random() < 0.2:
        arguments["num_return_sequences"] = 2 if arguments["do_sample"] else 1
    if pick.random() < 0.25:
        arguments |= {"num_beams": pick.choice((2, 3)), "early_stopping": pick.choice((True, False))}
    cache = pick.choice(("none", "none", "static", "dynamic", "brought"))
    if cache in ("static", "dynamic") and (_STATIC or cache == "dynamic"):
        arguments["cache_implementation"] = cache
    if pick.random() < 0.4:
        arguments |= {"return_dict_in_generate": True, "output_scores": pick.random() < 0.5}
    if cache in ("none", "dynamic") and pick.random() < 0.3:
        arguments |= {name: arguments[name][:1] for name in inputs}
        arguments = {name: arguments[name] for name in arguments if not name.startswith(("num_", "early_"))}
        arguments["prompt_lookup_num_tokens"] = pick.choice((2, 4, 10))
        arguments.setdefault("eos_token_id", 61)  # beyond the vocabulary; stock before 5.0 fails without one
    return arguments, cache == "brought" and "num_beams" not in arguments


def same_tokens(prepared, stock, numbers, **form):
    """Run the calls on both models, some with an assistant. Returns the seeds of the calls whose tokens differ."""
    differ = []
    windows = decide.windows(prepared)
    slides = isinstance(windows, str) or any(windows)
    for number in numbers:
        arguments, brings = call(number, **form)
        if slides and (_WINDOWS_FORGET_NOTHING or "return_dict_in_generate" in arguments):
            arguments.pop("prompt_lookup_num_tokens", None)
        tokens = []
        assists = not slides and number % 2 and arguments.pop("prompt_lookup_num_tokens", None) is not None
        for model in (stock, prepared):
            if assists:
                arguments.pop("cache_implementation", None)  # stock can't pass it to the assistant
                drafting = assistant_of(stock)
                if model is prepared:  # the assistant's own steps are recorded, too
                    drafting = hf_rocm.prepare(drafting, force=True, graphs=True)
                arguments["assistant_model"] = drafting
            torch.manual_seed(number)
            cache = {"past_key_values": DynamicCache()} if brings else {}
            result = model.generate(**arguments, **cache)
            tokens.append(result if isinstance(result, torch.Tensor) else result.sequences)
        if not torch.equal(*tokens):
            differ.append(number)
    assert known(prepared).disabled is None and not known(prepared).turned_away
    return differ
