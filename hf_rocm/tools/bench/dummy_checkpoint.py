"""A dummy checkpoint of a named shape, whose matrices take no space on disk and get random values after loading.

Ranks that share a model load it from a checkpoint, because transformers shards a model while loading it. The matrices
of this checkpoint are a hole in a sparse file, so even a large checkpoint is created instantly. They are read as zeros,
and each rank then fills its own part in memory. For servers, which can't do this, `fill_file` writes random values to
the file.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_rocm.tools.bench.roofline import local
from hf_rocm.tools.bench.shapes import architecture, default_dtype, deviation

MATRICES, VECTORS, INDEX = "matrices.safetensors", "vectors.safetensors", "model.safetensors.index.json"
_CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_SMALL = {"vocab_size": 512, "intermediate_size": 64, "moe_intermediate_size": 64}


def write(folder: Path, name: str, *, dtype: torch.dtype, layers: int | None = None) -> None:
    """Write a shape's config and checkpoint. Norms and biases get transformers' initial values; matrices are zero."""
    cls, config = architecture(name, layers=layers)
    with default_dtype(dtype), torch.device("meta"):
        model = cls(config)
        # transformers 5.0 ties weights only while loading; without this call, there would be two tensors.
        model.tie_weights()
    shapes = {path: tuple(parameter.shape) for path, parameter in model.named_parameters()}
    matrices = {path: shape for path, shape in shapes.items() if len(shape) > 1}
    values = _vectors(name, dtype)
    vectors = {
        path: torch.full(shape, values[_first_layer(path)], dtype=dtype)
        for path, shape in shapes.items()
        if len(shape) < 2
    }
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [cls.__name__]
    config.save_pretrained(folder)
    _hole(folder / MATRICES, matrices, dtype)
    from safetensors.torch import save_file

    save_file(vectors, str(folder / VECTORS), metadata={"format": "pt"})
    places = {**dict.fromkeys(matrices, MATRICES), **dict.fromkeys(vectors, VECTORS)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")


def fill(model: Any, folder: Path, *, rank: int) -> None:
    """Write random values to the matrices of a model that was loaded from a dummy checkpoint.

    A rank fills only its own part. Replicated parameters are equal on all ranks. Weights are scaled to preserve
    the magnitude of their input.
    """
    whole = _header(folder / MATRICES)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path in whole:
                part: Tensor = local(parameter)
                sharded = tuple(part.shape) != whole[path]
                _randomize(part, f"{path} {rank if sharded else 'all'}", whole[path])


def fill_file(folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
    """Write random values to the matrices in a dummy checkpoint's file, as `fill` does in an unsharded model.

    device: the device on which the values are generated. dtype: the dtype of the checkpoint.
    """
    shapes = _header(folder / MATRICES)
    with (folder / MATRICES).open("r+b") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        stream.seek(8 + size)
        # The header lists the matrices in the order in which the file stores them.
        for path, shape in shapes.items():
            values = torch.empty(shape, dtype=dtype, device=device)
            _randomize(values, f"{path} all", shape)
            stream.write(values.flatten().view(torch.uint8).cpu().numpy().data)


def _randomize(part: Tensor, name: str, whole: tuple[int, ...]) -> None:
    generator = torch.Generator(part.device).manual_seed(zlib.crc32(name.encode()))
    part.normal_(0.0, deviation(whole[-1]), generator=generator)


def _vectors(name: str, dtype: torch.dtype) -> dict[str, float]:
    """Map every vector of a small one-layer model of this class to the value of its elements, which are all equal."""
    from hf_rocm.tools.bench.known_shapes import shape

    small = {key: value for key, value in _SMALL.items() if key in shape(name).settings}
    cls, config = architecture(name, layers=1, **small)
    with default_dtype(dtype):
        model = cls(config)
    vectors = {}
    for path, parameter in model.named_parameters():
        if parameter.ndim < 2:
            value = parameter.detach().flatten()[0].item()
            assert bool((parameter == value).all()), path
            vectors[path] = value
    return vectors


def _first_layer(path: str) -> str:
    return re.sub(r"\.layers\.\d+\.", ".layers.0.", path)


def _hole(file: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for path, shape in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[path] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    return {path: tuple(facts["shape"]) for path, facts in header.items() if path != "__metadata__"}
