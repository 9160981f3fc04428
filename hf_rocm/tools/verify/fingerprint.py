"""Checksums that show, on any device, whether two models have bitwise equal weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Elements that are summed at once, as 8-byte integers.
_PIECE = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Return name → checksum for every tensor in the state dict."""
    with torch.no_grad():
        return {name: checksum(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def checksum(tensor: Tensor) -> str:
    """Return a checksum of dtype, shape and bytes, in 16 hexadecimal digits. It is not cryptographically secure."""
    words = tensor.detach().contiguous().view(-1)
    words = words.view(_WORDS[words.element_size()]) if words.numel() else words.to(torch.int64)
    total = 0
    for number, piece in enumerate(words.split(_PIECE)):
        factors = torch.arange(len(piece), device=piece.device, dtype=torch.int64) * 2 + 1
        # The product wraps around; an odd factor loses no bits.
        mixed = (piece.long() + 1) * (factors * -7046029254386353131)
        total = (total * 31 + int((mixed ^ (mixed >> 29)).sum()) + number) % (1 << 64)
    head = f"{tensor.dtype} {tuple(tensor.shape)} {total}"
    return hashlib.sha256(head.encode()).hexdigest()[:16]


def combined(fingerprints: Mapping[str, str]) -> str:
    """Return one checksum for a set of checksums."""
    return hashlib.sha256("\n".join(f"{k} {v}" for k, v in sorted(fingerprints.items())).encode()).hexdigest()[:16]


def of_config(config: Any) -> str:
    """Return a config's checksum, without paths, versions, dtypes, architectures, use_cache or private values.

    They are left out only at the top level: the checksum includes the dtypes and use_cache of nested configs.
    """
    import json

    ignored = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache"}
    values = {name: value for name, value in config.to_dict().items() if name not in ignored and name[0] != "_"}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def differing(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Return the names whose checksums differ, or that occur in only one of the mappings."""
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]
