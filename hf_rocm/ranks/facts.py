"""What must be the same on every rank for one model to run over all of them, as text by name.

Contents, not places: each node may have its own folders. It takes some tens of milliseconds, and of the GPU it asks
for the architecture alone.
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
from hf_rocm.overlay.block import has_block
from hf_rocm.overlay.facts import aiter_facts
from hf_rocm.overlay.locate import locate
from hf_rocm.ranks.environment import Place

# Arguments that may differ from node to node, or say where and how files are fetched.
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
_SECRET = frozenset(("token", "use_auth_token", "proxies"))  # of arguments that are dicts
_LOCAL_OPTIONS = frozenset(("probe_timeout", "refresh", "ranks_timeout"))
_SHOWN = 12  # digits of a digest

HINT = (
    "give every node the same hf-rocm, transformers, torch and aiter, run `hf-rocm install-overlays` on each or on "
    "none, and start every rank with the same arguments and environment; `hf-rocm env` on each shows what it has"
)


def facts(here: Place, arguments: Mapping[str, Any], config: Any) -> dict[str, str]:
    """The facts of this rank. arguments: those of this call, ours and transformers'. config: the model's, or None."""
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
    """What this rank computes on: gfx942, sm_90, or the CPU."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.device_count():
        return "none (CPU)"
    index = here.local if here.local < torch.cuda.device_count() else torch.cuda.current_device()
    if is_rocm():
        return gpu_arch(index) or "unknown"
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def _overlays() -> dict[str, str]:
    """Each model's overlays as they were shipped, and the modeling file that they are appended to or bound over."""
    shipped: dict[str, list[bytes]] = {}
    for file in sorted(_shipped().glob("transformers-*/models/*/modeling_*.py")):
        shipped.setdefault(file.parent.name, []).append(file.read_bytes())
    models = locate().root / "models"
    found = {}
    for name, texts in shipped.items():
        found[f"overlay of {name}"] = _short(b"\0".join(texts))
        file = models / name / f"modeling_{name}.py"
        if file.is_file():
            data = file.read_bytes()
            found[file.name] = f"{_short(data)}, {'overlay installed' if has_block(data) else 'no overlay installed'}"
    return found


def _shipped() -> Path:
    package = Path(__file__).resolve().parents[1]
    travelling = package / "_overlays"
    return travelling if travelling.is_dir() else package.parent / "overlays"


def _options() -> dict[str, str]:
    values = {name: value for name, value in asdict(options.current()).items() if name not in _LOCAL_OPTIONS}
    tables = [file.read_bytes() for file in options.tuned_files() if file.is_file()]
    values["AITER_CONFIG_GEMM_BF16"] = [_short(table) for table in tables]
    values["HF_ROCM_FORCE"] = options.force_requested()
    return {name: _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    """A value in words that are the same in every process: no addresses, no order of a set."""
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
    if hasattr(value, "mesh_dim_names"):  # a DeviceMesh
        return f"mesh {value.mesh.tolist()} {value.mesh_dim_names}"
    if hasattr(value, "to_dict"):
        return f"{type(value).__name__} {_canonical(value.to_dict())}"
    if type(value).__module__ == "torch":  # a dtype
        return str(value)
    return f"a {type(value).__qualname__}"


def _settings(config: Any) -> dict[str, Any]:
    settings = dict(config.to_dict())
    for name in ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version"):
        settings.pop(name, None)
    return settings


def _digest(value: Any) -> str:
    return _short(json.dumps(_canonical(value)).encode())


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_SHOWN]
