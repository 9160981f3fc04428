"""The requirements of a named model, read from its folder or the Hub's cache, without downloading or loading it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class ModelFacts:
    """One model.

    folder: None if it is not on this machine. weights: bytes on disk. dtype: that of the checkpoint. per_token: bytes
    of KV cache per token in that dtype, None if the config lacks the sizes. free: free bytes on the disk of the folder
    or, without a folder, of the Hub's cache. memory: bytes of available RAM. conv3d: whether images are embedded by a
    Conv3d over frames. sinks: whether the model's attention has sinks.
    """

    name: str
    folder: str | None = None
    weights: int = 0
    dtype: str | None = None
    per_token: int | None = None
    free: int | None = None
    memory: int | None = None
    quantized: bool = False
    conv3d: bool = False
    sinks: bool = False


def model_facts(name: str, *, cache: Path, memory: int | None) -> ModelFacts:
    """Read the properties of a model. cache: the Hub's cache folder. memory: bytes of available RAM."""
    folder = Path(name) if Path(name).is_dir() else cached(name, cache)
    free = _free(folder or cache)
    if folder is None:
        return ModelFacts(name, free=free, memory=memory)
    config = _config(folder)
    text = {**config, **(config.get("text_config") or {})}
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype")
    return ModelFacts(
        name,
        folder=str(folder),
        weights=_weights(folder),
        dtype=dtype if isinstance(dtype, str) else None,
        per_token=_per_token(text, BYTES.get(str(dtype), 2)),
        free=free,
        memory=memory,
        quantized="quantization_config" in config,
        sinks=str(config.get("model_type", "")).startswith("gpt_oss"),
        conv3d="temporal_patch_size" in (config.get("vision_config") or {}),
    )


def cached(name: str, cache: Path) -> Path | None:
    """Return the folder of the newest cached snapshot of a Hub model that contains a config, or None."""
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    candidates = [candidate for candidate in snapshots.glob("*") if (candidate / "config.json").is_file()]
    return max(candidates, key=lambda candidate: candidate.stat().st_mtime, default=None)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _weights(folder: Path) -> int:
    """Return the size of the weight files in bytes, in the first format of `WEIGHTS` that the folder contains, or 0."""
    for suffix in WEIGHTS:
        sizes = [file.stat().st_size for file in folder.glob(f"*{suffix}")]
        if sizes:
            return sum(sizes)
    return 0


def _per_token(config: dict[str, Any], width: int) -> int | None:
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if not layers or not heads:
        return None
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or int(config.get("hidden_size", 0)) // int(heads)
    return 2 * int(layers) * int(kv_heads) * int(head_dim) * width or None


def _free(path: Path) -> int | None:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
