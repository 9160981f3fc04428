"""Read the names, dtypes and shapes of a checkpoint's tensors from the headers of its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_rocm.errors import LoadError
from hf_rocm.weights.stored import TensorInfo

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", None),
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
# The largest header that is read, in bytes; the format allows 100 MB.
_LARGEST = 100 * 2**20


class Entry(NamedTuple):
    """A tensor in a file. start, stop: the range of its bytes."""

    file: str
    start: int
    stop: int
    info: TensorInfo

    def values(self) -> tuple[Any, ...]:
        """Return the values of a small tensor."""
        return tuple(self.tensor().flatten().tolist())

    def tensor(self) -> torch.Tensor:
        """Return the tensor on the CPU."""
        with Path(self.file).open("rb") as file:
            file.seek(self.start)
            data = bytearray(file.read(self.stop - self.start))
        dtype, shape = self.info
        return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def read(files: Sequence[str | PathLike[str]]) -> dict[str, Entry]:
    """Return an entry for every tensor of these files, by name, except those whose dtype `_DTYPES` or this torch lacks.

    Raises `LoadError` if a file is not a complete safetensors file.
    """
    return {name: entry for file in files for name, entry in _read(Path(file)).items()}


def _read(path: Path) -> dict[str, Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LARGEST, size - 8):
            raise _damaged(path, "a header", f"{size} bytes that do not begin with one")
        try:
            header = json.loads(file.read(length))
            entries = dict(_entries(path, 8 + length, header))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(path, "a JSON header", f"{type(error).__name__}: {error}") from error
    end = max((int(item["data_offsets"][1]) for name, item in header.items() if name != "__metadata__"), default=0)
    if size < 8 + length + end:
        raise _damaged(path, f"{8 + length + end} bytes", f"{size} bytes: the file is truncated")
    return entries


def _entries(path: Path, base: int, header: dict[str, Any]) -> list[tuple[str, Entry]]:
    entries = []
    for name, item in header.items():
        dtype = None if name == "__metadata__" else _DTYPES.get(item["dtype"])
        if dtype is not None:
            start, stop = item["data_offsets"]
            entries.append((name, Entry(str(path), base + start, base + stop, TensorInfo(dtype, tuple(item["shape"])))))
    return entries


def _damaged(path: Path, expected: str, actual: str) -> LoadError:
    return LoadError(
        "a file of the checkpoint is damaged",
        facts={"file": path, "expected": expected, "found": actual},
        hint="download it again",
    )
