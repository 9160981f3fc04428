"""Checksums of weights, which show on any device whether two models have bitwise equal weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_PIECE = 1 << 22  # elements that are summed at once, as integers of eight bytes
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: nn.Module) -> dict[str, str]:
    """A checksum for each tensor of the state dict, under its name."""
    with torch.no_grad():
        return {name: checksum(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def checksum(tensor: Tensor) -> str:
    """16 hexadecimal digits of dtype, shape and bytes. Detects damage, but is not cryptographically secure."""
    words = tensor.detach().contiguous().view(-1)
    words = words.view(_WORDS[words.element_size()]) if words.numel() else words.to(torch.int64)
    total = 0
    for number, piece in enumerate(words.split(_PIECE)):
        places = torch.arange(len(piece), device=piece.device, dtype=torch.int64) * 2 + 1
        mixed = (piece.long() + 1) * (places * -7046029254386353131)  # odd, so that no bit is lost; wraps around
        total = (total * 31 + int((mixed ^ (mixed >> 29)).sum()) + number) % (1 << 64)
    head = f"{tensor.dtype} {tuple(tensor.shape)} {total}"
    return hashlib.sha256(head.encode()).hexdigest()[:16]


def together(fingerprints: Mapping[str, str]) -> str:
    """One checksum for a set of checksums."""
    return hashlib.sha256("\n".join(f"{k} {v}" for k, v in sorted(fingerprints.items())).encode()).hexdigest()[:16]


def of_config(config: Any) -> str:
    """A checksum of a config, without paths, versions and dtypes."""
    import json

    ignored = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache"}
    values = {name: value for name, value in config.to_dict().items() if name not in ignored and name[0] != "_"}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def differing(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Names whose checksums differ, and those that only one of the two has."""
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]
