"""A checkpoint of a named shape that servers can load: random weights on disk, and a tokenizer with one word per token.

A server is a separate process, so it can't be given a model with weights in memory.
"""

from __future__ import annotations

import json
import shutil
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch

from hf_rocm.errors import OptionError
from hf_rocm.tools.bench import dummy_checkpoint
from hf_rocm.tools.bench.known_shapes import shape

_UNKNOWN = "<unk>"
# Letters per word: enough for 26⁴ = 456,976 words.
_LETTERS = 4
_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write(folder: Path, name: str, *, device: torch.device, dtype: torch.dtype, layers: int | None = None) -> None:
    """Write the config, random weights and a tokenizer. device: where the random numbers are generated.

    Raises `OptionError` for an encoder, if this release of transformers lacks the model, and if the disk is too small.
    """
    if shape(name).encoder:
        raise OptionError(f"{name} is an encoder, which generates no text", hint="select another --config")
    dummy_checkpoint.write(folder, name, dtype=dtype, layers=layers)
    needed, free = (folder / dummy_checkpoint.MATRICES).stat().st_size, shutil.disk_usage(folder).free
    if needed > free:
        raise OptionError(
            f"the random weights of {name} don't fit on the disk",
            facts={"needed": f"{needed / 1e9:.1f} GB", "free": f"{free / 1e9:.1f} GB in {folder.parent}"},
            hint="use fewer --layers, or set TMPDIR to a folder on a larger disk",
        )
    dummy_checkpoint.fill_file(folder, device=device, dtype=dtype)
    tokenizer(shape(name).settings["vocab_size"]).save_pretrained(folder)


def tokenizer(size: int) -> Any:
    """Return a tokenizer with `size` tokens: `<unk>`, and different words of four letters.

    Text is split at spaces, so a prompt of N words has N tokens, and every token of an answer is visible in its text.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    words = ["".join(letters) for letters in islice(product(ascii_lowercase, repeat=_LETTERS), size - 1)]
    vocabulary = {word: token for token, word in enumerate([_UNKNOWN, *words])}
    definition = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": _UNKNOWN},
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(definition)),
        unk_token=_UNKNOWN,
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
        # the servers pass all outputs of the tokenizer to the model
        model_input_names=["input_ids", "attention_mask"],
    )
