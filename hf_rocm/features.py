"""The internals of transformers that each feature depends on, and whether they are known to work.

These internals change far more often than the models do. `overlays/features.toml` records the digests of every part in
each release (scripts/refresh-digests updates it). If a digest differs, or a part was replaced in this process, the
features that depend on it are disabled with a reason. Overlays are applied even if a feature is disabled.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from hf_rocm import patches
from hf_rocm.overlay.block import sha256
from hf_rocm.overlay.dependencies import Reference
from hf_rocm.overlay.digest import digests
from hf_rocm.overlay.manifest import Manifest, Record, parse
from hf_rocm.overlay.replacements import Watch

FILE = "features.toml"
# Recorded instead of a digest for releases that lack the name.
ABSENT = "absent"

_GENERATION = "transformers.generation.utils:GenerationMixin."
_CACHES = "transformers.cache_utils:"
_MASKS = "transformers.masking_utils:"
_PROCESSORS = "transformers.generation.logits_process:"
_CRITERIA = "transformers.generation.stopping_criteria:"

_FLASH = "transformers.modeling_flash_attention_utils:"
_BATCHES = "transformers.generation.continuous_batching."
_ALLOCATORS = f"{_BATCHES}cache_allocators."
_MODELS = "transformers.modeling_utils:PreTrainedModel."

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

# Encoders whose results do not depend on masked tokens at the end of a row → the prefix of their class names, and the
# classes that depend on the length of a call, in addition to those whose names consist of the prefix and one of
# `_PADDED_TASKS`
_PADDED_PARTS = {
    "bert": ("Bert", ("BertEmbeddings", "BertEncoder", "BertPooler")),
    "camembert": ("Camembert", ("CamembertEmbeddings", "CamembertEncoder", "CamembertClassificationHead")),
    "distilbert": ("DistilBert", ("Embeddings", "Transformer")),
    "electra": ("Electra", ("ElectraEmbeddings", "ElectraEncoder", "ElectraClassificationHead")),
    "modernbert": ("ModernBert", ("ModernBertEmbeddings", "ModernBertPredictionHead")),
    "mpnet": ("MPNet", ("MPNetEmbeddings", "MPNetEncoder", "MPNetPooler", "MPNetClassificationHead")),
    "roberta": ("Roberta", ("RobertaEmbeddings", "RobertaEncoder", "RobertaPooler", "RobertaClassificationHead")),
    "xlm_roberta": ("XLMRoberta", ("XLMRobertaEmbeddings", "XLMRobertaEncoder", "XLMRobertaClassificationHead")),
}
_PADDED_TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")

# feature → the names (`module:name`) whose digests are recorded
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
    # caches that a call receives or returns: new keys and values are written back with the cache's own `update`
    "user_caches": (
        *(f"{_CACHES}{name}" for name in ("DynamicCache", "DynamicLayer", "DynamicSlidingWindowLayer")),
        *_STATIC_CACHES,
    ),
    "recurrent_states": (
        f"{_CACHES}LinearAttentionLayer",
        f"{_CACHES}LinearAttentionCacheLayerMixin",
        *(f"{_CACHES}Cache.{name}" for name in ("update_conv_state", "update_recurrent_state", "has_previous_state")),
        *(f"{_CACHES}Cache.{name}" for name in ("get_conv_state", "get_recurrent_state", "is_recording_past")),
        f"{_MASKS}create_recurrent_attention_mask",
    ),
    "beams": tuple(
        f"{_GENERATION}{name}" for name in ("_beam_search", "_temporary_reorder_cache", "_flatten_beam_dim")
    ),
    "speculation": (
        f"{_GENERATION}_assisted_decoding",
        f"{_GENERATION}_get_candidate_generator",
        *(
            f"transformers.generation.candidate_generator:{name}"
            for name in (
                "_crop_past_key_values",
                "_prepare_attention_mask",
                "_prepare_position_ids",
                "_prepare_token_type_ids",
            )
        ),
    ),
    "assistants": (
        *(
            f"transformers.generation.candidate_generator:{name}"
            for name in (
                "AssistedCandidateGenerator",
                "AssistedCandidateGeneratorDifferentTokenizers",
                "UniversalSpeculativeDecodingGenerator",
            )
        ),
        f"{_CACHES}Cache.crop",
        f"{_CACHES}DynamicCache.crop",
    ),
    # rounds of an assistant without a call of its `generate`; requires assistants
    "drafting": (
        *(f"{_GENERATION}{name}" for name in ("generate", "_get_logits_processor", "_get_stopping_criteria")),
        *(f"{_CRITERIA}{name}" for name in ("ConfidenceCriteria", "EosTokenCriteria", "MaxLengthCriteria")),
        *(f"{_PROCESSORS}{name}LogitsProcessor" for name in ("MinLength", "MinNewTokensLength")),
    ),
    "prompt_lookup": ("transformers.generation.candidate_generator:PromptLookupCandidateGenerator",),
    "token_choice": (
        *(f"{_PROCESSORS}{name}" for name in ("LogitsProcessorList", "EpsilonLogitsWarper", "LogitNormalization")),
        *(f"{_PROCESSORS}{name}LogitsWarper" for name in ("MinP", "Temperature", "TopK", "TopP", "Typical")),
        f"{_PROCESSORS}InfNanRemoveLogitsProcessor",
        *(f"{_CRITERIA}{name}" for name in ("StoppingCriteriaList", "EosTokenCriteria", "MaxLengthCriteria")),
    ),
    "encoder_decoder": (f"{_CACHES}EncoderDecoderCache", f"{_MASKS}create_bidirectional_mask"),
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
    # only column-wise layers, because row-wise layers are called as modules
    "tensor_parallel": (
        *(f"{_SHARDS}{name}" for name in ("TensorParallelLayer", "ColwiseParallel", "distribute_module")),
        *(f"transformers.distributed.tensor_parallel:{name}" for name in ("TensorParallelLayer", "ColwiseParallel")),
    ),
    "flash_interface": (
        *(f"{_FLASH}{name}" for name in ("_flash_attention_forward", "_process_flash_attention_kwargs", "_upad_input")),
        *(f"{_FLASH}{name}" for name in ("lazy_import_flash_attention", "lazy_import_paged_flash_attention")),
        f"{_FLASH}_lazy_define_process_function",
        "transformers.integrations.flash_attention:flash_attention_forward",
        *(
            f"transformers.integrations.flash_paged:{name}"
            for name in ("paged_attention_forward", "_paged_decode_forward")
        ),
        *(
            f"{_BATCHES}cache:PagedAttentionCache.{name}"
            for name in ("update", "fill_block_table", "get_block_table_key")
        ),
        *(
            f"{_BATCHES}continuous_api:ContinuousBatchingManager.{name}"
            for name in ("switch_to_cb_friendly_attn", "stop")
        ),
        f"{_BATCHES}initialization:ensure_decode_fast_path_is_available",
        *(f"{_MODELS}{name}" for name in ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation")),
        f"{_MODELS}set_attn_implementation",
    ),
    # page tables for sliding layers; requires flash_interface
    "sliding_pages": (
        *(
            f"{_ALLOCATORS}sliding_attention:SlidingAttentionCacheAllocator",
            f"{_ALLOCATORS}full_attention:FullAttentionCacheAllocator",
        ),
        *(f"{_BATCHES}cache:{name}" for name in ("ATTN_TYPE_TO_ALLOCATOR", "group_layers_by_attn_type")),
        f"{_BATCHES}cache:PagedAttentionCache._infer_max_decode_fast_path_length",
        *(
            f"{_BATCHES}input_outputs:ContinuousBatchingIOs.{name}"
            for name in ("prepare_batch_tensors", "get_model_kwargs")
        ),
        f"{_BATCHES}scheduler:Scheduler._process_candidates",
        f"{_BATCHES}continuous_api:ContinuousBatchingManager._create_batch_processor",
    ),
    # the update of the frequencies before the forward of a rotary embedding
    "rotary_embedding": ("transformers.modeling_rope_utils:dynamic_rope_update",),
    "static_cache": (f"{_CACHES}StaticCache", f"{_CACHES}StaticLayer", f"{_CACHES}Cache.update"),
    "dynamic_cache": (f"{_CACHES}DynamicCache", f"{_CACHES}DynamicLayer", f"{_CACHES}Cache.update"),
    # encoders whose calls are padded to a few lengths
    **{
        f"padding_{model}": tuple(
            f"transformers.models.{model}.modeling_{model}:{name}"
            for name in (*(f"{prefix}{task}" for task in _PADDED_TASKS), *parts)
        )
        for model, (prefix, parts) in _PADDED_PARTS.items()
    },
}


def padding_of(cls: type) -> str | None:
    """Return the feature of a class whose calls are padded to a few lengths, or None."""
    feature = f"padding_{cls.__module__.rpartition('.modeling_')[2]}"
    names = FEATURES.get(feature, ())[: len(_PADDED_TASKS)]
    stock = getattr(sys.modules.get(cls.__module__), cls.__name__, None)
    return feature if f"{cls.__module__}:{cls.__name__}" in names and stock is cls else None


def refuses(feature: str) -> str | None:
    """Return why a feature (a key of `FEATURES`) is disabled now: a sentence about transformers, or None.

    The files that transformers was imported from are compared with the recorded digests once per process. The objects
    in memory are compared by identity on every call, to detect replacements.
    """
    reason = _unrecorded(feature)
    return replaced(feature) if reason is None else reason


def replaced(feature: str) -> str | None:
    """Return a sentence about the part of a feature that was replaced in this process, or None."""
    missing, watch = _watches.get(feature, _NOTHING)
    if watch is None or any(module in sys.modules for module in missing):
        missing = tuple(module for module in modules(feature) if module not in sys.modules)
        watch = Watch(_places(feature))
        _watches[feature] = missing, watch
    reason = None if watch.unchanged() else watch.difference()
    return None if reason is None else f"a part of transformers that it depends on was replaced: {reason}"


@cache
def _unrecorded(feature: str) -> str | None:
    """Return a sentence about the first part whose source in this release was not recorded, or None."""
    record = _manifest().records.get(feature, Record())
    files = {module: _file(module) for module in modules(feature)}
    if combined(content for _, content in sorted(files.items())) not in record.files:
        for name in FEATURES[feature]:
            module, _, inner = name.partition(":")
            digest = digests(files[module], [inner])[inner] or ABSENT
            if digest not in record.names.get(name, {}):
                return f"{inner} of transformers {_version()} is not supported (digest {digest})"
    return None


def refused() -> dict[str, str]:
    """Return every feature that is disabled because of transformers, with the reason."""
    return {feature: reason for feature in FEATURES if (reason := refuses(feature)) is not None}


@cache
def modules(feature: str) -> list[str]:
    """Return the modules of transformers that a feature depends on."""
    return sorted({name.partition(":")[0] for name in FEATURES[feature]})


def combined(contents: Any) -> str:
    """Return one hash of several files, given in the order of their modules' names."""
    return sha256(b"".join(sha256(content).encode() for content in contents))


@cache
def _manifest() -> Manifest:
    from hf_rocm.overlay.catalog import load

    file = load().root / FILE
    return parse(file.read_text(encoding="utf-8"), source=file)


def _file(module: str) -> bytes:
    """Return the content of a module's source file; empty if this release has no such module."""
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


def _places(feature: str) -> Iterator[Reference]:
    """Yield the attributes that hold the parts in this process: functions and classes of modules, and methods."""
    for name in FEATURES[feature]:
        module, _, inner = name.partition(":")
        loaded = sys.modules.get(module)
        if loaded is None:
            continue
        cls, _, method = inner.partition(".")
        part = vars(loaded).get(cls)
        if inspect.isclass(part):
            yield Reference(vars(loaded), cls)
            names = [method] if method else _functions(part)
            yield from (Reference(part, key) for key in names if _is_code(inspect.getattr_static(part, key, None)))
        elif callable(part):
            yield Reference(vars(loaded), inner)


def _functions(cls: type) -> list[str]:
    """Return the names of the functions that a class defines, except those that hf_rocm added."""
    names = [name for name, value in vars(cls).items() if inspect.isfunction(value)]
    return [name for name in names if patches.original(cls, name) is not patches.ABSENT]


def _is_code(value: Any) -> bool:
    """Return whether a class attribute is code. A property may be a plain value in older releases."""
    return callable(value) or isinstance(value, (property, staticmethod, classmethod))


_NOTHING: tuple[tuple[str, ...], Watch | None] = ((), None)

# Feature → its modules that are not imported yet, and the watched attributes of its other modules.
_watches: dict[str, tuple[tuple[str, ...], Watch | None]] = {}
