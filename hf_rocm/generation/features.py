"""Which parts of transformers' own machinery each feature leans on, and whether they are what it was made for.

That machinery changes far more often than the models do. `overlays/features.toml` records the digests of every part, in
the releases where it was seen (scripts/refresh-digests keeps it). Where one differs, or was replaced in this process,
the features that lean on it are off, with the reason; no overlay depends on it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_rocm.overlay.block import sha256
from hf_rocm.overlay.digest import digests
from hf_rocm.overlay.manifest import Manifest, Record, parse

FILE = "features.toml"
ABSENT = "absent"  # stands for a digest, in releases that don't have the name
_PACKAGE = "transformers"

_GENERATION = "transformers.generation.utils:GenerationMixin."
_CACHES = "transformers.cache_utils:"
_MASKS = "transformers.masking_utils:"

_SHARDS = "transformers.integrations.tensor_parallel:"

_STATIC_CACHES = (
    *(f"{_CACHES}{name}" for name in ("StaticCache", "StaticLayer", "StaticSlidingWindowLayer", "SlidingWindowLayer")),
    *(f"{_CACHES}{name}" for name in ("SlidingWindowCache", "HybridCache", "HybridChunkedCache")),
    *(f"{_CACHES}{name}" for name in ("_static_cache_update", "_sliding_cache_update")),
    *(f"{_CACHES}Cache.{name}" for name in ("update", "get_seq_length", "get_query_offset", "get_mask_sizes")),
    f"{_CACHES}Cache.is_compileable",
)
_CAUSAL_MASKS = (
    f"{_MASKS}create_masks_for_generate",
    f"{_MASKS}create_causal_mask",
    f"{_MASKS}create_sliding_window_causal_mask",
    f"{_MASKS}LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING",
    f"{_MASKS}_preprocess_mask_arguments",
    f"{_MASKS}sdpa_mask",
    f"{_MASKS}sdpa_mask_recent_torch",
    f"{_MASKS}eager_mask",
    f"{_MASKS}causal_mask_function",
    f"{_MASKS}sliding_window_causal_mask_function",
    f"{_MASKS}sliding_window_overlay",
    f"{_MASKS}prepare_padding_mask",
)

# feature → the names, `module:name`, whose digests are recorded
FEATURES: dict[str, tuple[str, ...]] = {
    "graph_decode": (
        f"{_GENERATION}get_compiled_call",
        f"{_GENERATION}_valid_auto_compile_criteria",
        f"{_GENERATION}_prepare_cache_for_generation",
        f"{_GENERATION}_get_cache",
        f"{_GENERATION}_prepare_static_cache",
        f"{_GENERATION}_optimize_model_for_decode",
        f"{_GENERATION}_sample",
        f"{_GENERATION}_prefill",
        f"{_GENERATION}_prefill_chunking",
        *_STATIC_CACHES,
    ),
    "decode_inputs": (
        f"{_GENERATION}prepare_inputs_for_generation",
        f"{_GENERATION}_update_model_kwargs_for_generation",
        f"{_GENERATION}_cache_dependant_input_preparation",
        f"{_GENERATION}_get_initial_cache_position",
        f"{_GENERATION}_prepare_position_ids_for_generation",
        f"{_GENERATION}_sample",
        f"{_GENERATION}_prefill",
        *_CAUSAL_MASKS,
        *_STATIC_CACHES,
        "transformers.integrations.sdpa_attention:sdpa_attention_forward",
    ),
    "plain_masks": (
        f"{_MASKS}AttentionMaskInterface",
        f"{_MASKS}sdpa_mask",
        f"{_MASKS}sdpa_mask_recent_torch",
        f"{_MASKS}eager_mask",
        f"{_MASKS}prepare_padding_mask",
        f"{_MASKS}padding_mask_function",
        f"{_MASKS}_ignore_causal_mask_sdpa",
        f"{_MASKS}and_masks",
        f"{_MASKS}or_masks",
        f"{_MASKS}causal_mask_function",
        f"{_MASKS}sliding_window_overlay",
        f"{_MASKS}chunked_overlay",
        f"{_MASKS}packed_sequence_mask_function",
    ),
    # column-wise layers alone: row-wise ones are called as modules
    "tensor_parallel": (
        *(f"{_SHARDS}{name}" for name in ("TensorParallelLayer", "ColwiseParallel", "distribute_module")),
        *(f"transformers.distributed.tensor_parallel:{name}" for name in ("TensorParallelLayer", "ColwiseParallel")),
    ),
    "static_cache": (f"{_CACHES}StaticCache", f"{_CACHES}StaticLayer", f"{_CACHES}Cache.update"),
}


@cache
def refuses(feature: str) -> str | None:
    """Why a feature (a key of `FEATURES`) is off in this process: a sentence about transformers, or None.

    Looked up once: the files that transformers was imported from are compared with those that were seen, and what the
    process has in their place with the files.
    """
    record = _manifest().records.get(feature, Record())
    files = {module: _file(module) for module in modules(feature)}
    if combined(content for _, content in sorted(files.items())) not in record.files:
        for name in FEATURES[feature]:
            module, _, inner = name.partition(":")
            found = digests(files[module], [inner])[inner] or ABSENT
            if found not in record.names.get(name, {}):
                return f"transformers {_version()} has a {inner} that this was not made for (digest {found})"
    return next(_replaced(feature), None)


def refused() -> dict[str, str]:
    """Every feature that is off because of transformers, and why."""
    return {feature: reason for feature in FEATURES if (reason := refuses(feature)) is not None}


def modules(feature: str) -> list[str]:
    """The modules of transformers that a feature leans on."""
    return sorted({name.partition(":")[0] for name in FEATURES[feature]})


def combined(contents: Any) -> str:
    """One hash of several files, in the order of their modules' names."""
    return sha256(b"".join(sha256(content).encode() for content in contents))


@cache
def _manifest() -> Manifest:
    from hf_rocm.overlay.catalog import load

    file = load().root / FILE
    return parse(file.read_text(encoding="utf-8"), source=file)


def _file(module: str) -> bytes:
    """A module's text as it was imported, or would be; nothing where the release has no such module."""
    import transformers

    stem = Path(transformers.__file__).parent.joinpath(*module.split(".")[1:])
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path.read_bytes()
    return b""


def _version() -> str:
    import transformers

    version: str = transformers.__version__
    return version


def _replaced(feature: str) -> Iterator[str]:
    """What this process has in a part's place, if it comes from elsewhere."""
    for name in FEATURES[feature]:
        module, _, inner = name.partition(":")
        loaded = sys.modules.get(module)
        if loaded is None:
            continue
        for part, found in _functions(loaded, inner):
            origin = getattr(inspect.unwrap(found), "__module__", None) or ""
            if origin.split(".")[0] != _PACKAGE:
                yield f"{part} of transformers was replaced in this process by {origin or 'something else'}"


def _functions(module: ModuleType, name: str) -> Iterator[tuple[str, Any]]:
    """The functions that a name stands for: itself, or the methods of a class."""
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    if inspect.isclass(found):
        for method, each in vars(found).items():
            if inspect.isfunction(each):
                yield f"{name}.{method}", each
    elif isinstance(found, (staticmethod, classmethod)):
        yield name, found.__func__
    elif callable(found):
        yield name, found
