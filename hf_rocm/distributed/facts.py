"""The facts that must be equal on all ranks that run one model together, as a mapping of names to text.

They describe contents, not paths: folders may differ between nodes. Collecting them takes tens of milliseconds.
The only fact about the GPU is its architecture.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from hf_rocm import __version__, options
from hf_rocm.device import gpu_arch, is_rocm
from hf_rocm.distributed.environment import Place
from hf_rocm.overlay.block import has_block
from hf_rocm.overlay.facts import aiter_facts
from hf_rocm.overlay.locate import locate

# Arguments that are not compared, such as paths, download settings and the placement on devices.
LOCAL = frozenset(
    (
        "cache_dir",
        "config",
        "device_map",
        "force_download",
        "key_mapping",
        "local_files_only",
        "max_memory",
        "offload_buffers",
        "offload_folder",
        "output_loading_info",
        "proxies",
        "resume_download",
        "state_dict",
        "token",
        "use_auth_token",
    )
)
# Keys that are omitted from dict arguments.
_SECRET = frozenset(("token", "use_auth_token", "proxies"))
_LOCAL_OPTIONS = frozenset(("probe_timeout", "refresh", "ranks_timeout"))
# The number of hexadecimal digits to which a digest is shortened.
_SHOWN = 12

HINT = (
    "install the same versions of hf-rocm, transformers, torch and aiter on every node, run `hf-rocm install-overlays` "
    "on all or none of them, and start every rank with the same arguments and environment; compare `hf-rocm env` of "
    "the nodes"
)


def facts(here: Place, arguments: Mapping[str, Any], config: Any) -> dict[str, str]:
    """Return this rank's facts.

    arguments: the arguments of hf_rocm and of transformers. config: the model's config, or None.
    """
    import torch
    import transformers

    return {
        "hf_rocm": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "GPU": architecture(here),
        "aiter": aiter_facts().sentence,
        **_overlays(),
        **{f"option {name}": value for name, value in _options().items()},
        **{f"argument {name}": _text(value) for name, value in arguments.items() if name not in LOCAL},
        "the model's config": "not read before loading" if config is None else _digest(_settings(config)),
    }


def architecture(here: Place) -> str:
    """Return the architecture of this rank's GPU, such as `gfx942` or `sm_90`; `none (CPU)` without a GPU."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.device_count():
        return "none (CPU)"
    index = here.local if here.local < torch.cuda.device_count() else torch.cuda.current_device()
    if is_rocm():
        return gpu_arch(index) or "unknown"
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def _overlays() -> dict[str, str]:
    """Return digests of the shipped overlays and of the installed modeling files that they belong to, by name."""
    shipped: dict[str, list[bytes]] = {}
    for file in sorted(_shipped().glob("transformers-*/models/*/modeling_*.py")):
        shipped.setdefault(file.parent.name, []).append(file.read_bytes())
    models = locate().root / "models"
    overlays = {}
    for name, texts in shipped.items():
        overlays[f"overlay of {name}"] = _short(b"\0".join(texts))
        file = models / name / f"modeling_{name}.py"
        if file.is_file():
            data = file.read_bytes()
            installed = "overlay installed" if has_block(data) else "no overlay installed"
            overlays[file.name] = f"{_short(data)}, {installed}"
    return overlays


def _shipped() -> Path:
    package = Path(__file__).resolve().parents[1]
    packaged = package / "_overlays"
    return packaged if packaged.is_dir() else package.parent / "overlays"


def _options() -> dict[str, str]:
    values = {name: value for name, value in asdict(options.current()).items() if name not in _LOCAL_OPTIONS}
    tables = [file.read_bytes() for file in options.tuned_files() if file.is_file()]
    values["AITER_CONFIG_GEMM_BF16"] = [_short(table) for table in tables]
    values["HF_ROCM_FORCE"] = options.force_requested()
    return {name: _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    """Return text that is the same in every process for equal values: without addresses, and with sorted sets.

    Text of more than 80 characters is replaced by its beginning and a digest.
    """
    text = _canonical(value)
    return text if len(text) <= 80 else f"{text[:40]}… ({_short(text.encode())})"


def _canonical(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, Mapping):
        shared = sorted(((k, v) for k, v in value.items() if k not in _SECRET), key=str)
        return "{" + ", ".join(f"{_canonical(k)}: {_canonical(v)}" for k, v in shared) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_canonical, value))) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_canonical, value)) + "]"
    if hasattr(value, "mesh_dim_names"):
        # `value` is a DeviceMesh.
        return f"mesh {value.mesh.tolist()} {value.mesh_dim_names}"
    if hasattr(value, "to_dict"):
        return f"{type(value).__name__} {_canonical(value.to_dict())}"
    if type(value).__module__ == "torch":
        # `value` is a dtype.
        return str(value)
    return f"a value of type {type(value).__qualname__}"


def _settings(config: Any) -> dict[str, Any]:
    settings = dict(config.to_dict())
    for name in ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version"):
        settings.pop(name, None)
    return settings


def _digest(value: Any) -> str:
    return _short(json.dumps(_canonical(value)).encode())


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_SHOWN]
