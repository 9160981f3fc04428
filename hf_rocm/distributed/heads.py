"""Check that tensor parallelism can divide the attention heads.

transformers splits the rows of the weights of q, k and v among the ranks, even in the middle of a head; the first
forward then fails on every rank with a shape error. This check raises before any weight is loaded. Where a plan gathers
the outputs (`colwise_rep`, `colwise_gather_output`), every rank has all heads and any number is valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_rocm.distributed.environment import setting
from hf_rocm.errors import RankError

_DIVIDES = "colwise"
# in MLA, kv_b_proj computes k and v for every query head
_QUERY, _KEY_VALUE = ("q_proj", "q_b_proj", "kv_b_proj"), ("k_proj", "v_proj")
_COUNTS = {
    "num_attention_heads": _QUERY,
    "num_key_value_heads": _KEY_VALUE,
    "num_global_key_value_heads": _KEY_VALUE,
}


def check(config: Any, size: int, arguments: Mapping[str, Any]) -> None:
    """Raise `RankError` if the plan for this config splits heads whose number is not divisible by the number of ranks.

    size: the number of ranks. arguments: those of `from_pretrained`, which may contain a plan.
    """
    if config is None or size < 2:
        return
    user_plan = arguments.get("tp_plan") or setting(arguments.get("distributed_config"), "tp_plan")
    if setting(arguments.get("distributed_config"), "enable_expert_parallel") and user_plan is None:
        # Only the plan for experts applies.
        return
    for part in _parts(config):
        plan = dict(getattr(part, "base_model_tp_plan", None) or {})
        if isinstance(user_plan, Mapping):
            plan = {**plan, **user_plan} if user_plan else {}
        counts = _divided(part, plan)
        wrong = {name: heads for name, heads in counts.items() if any(count % size for count in heads)}
        if wrong:
            raise _refusal(part, size, wrong, counts)


def _parts(config: Any) -> Iterator[Any]:
    """Yield the config and its sub-configs: a vision-language model has one for text and one for images."""
    yield config
    for name in getattr(config, "sub_configs", None) or {}:
        inner = getattr(config, name, None)
        if inner is not None and inner is not config and hasattr(inner, "to_dict"):
            yield from _parts(inner)


def _divided(config: Any, plan: Mapping[str, str]) -> dict[str, list[int]]:
    """Return the numbers of heads that the plan splits, by name in the config, which may list one number per layer."""
    layers = {key.removesuffix(".weight").removesuffix(".linear").rsplit(".", 1)[-1] for key in _dividing(plan)}
    counts = {}
    for name, projections in _COUNTS.items():
        value = getattr(config, name, None)
        heads = [value] if isinstance(value, int) else value
        if name == "num_global_key_value_heads" and not getattr(config, "attention_k_eq_v", True):
            # Without attention_k_eq_v, Gemma 4 sets this number but does not use it.
            continue
        if isinstance(heads, (list, tuple)) and layers.intersection(projections):
            counts[name] = [count for count in heads if isinstance(count, int)]
    return counts


def _dividing(plan: Mapping[str, str]) -> list[str]:
    return [key for key, style in plan.items() if style == _DIVIDES]


def _refusal(config: Any, size: int, wrong: Mapping[str, list[int]], counts: Mapping[str, list[int]]) -> RankError:
    numbers_of_heads = [heads for values in counts.values() for heads in values]
    sizes = [n for n in range(1, max(numbers_of_heads) + 1) if not any(heads % n for heads in numbers_of_heads)]
    numbers = {name: ", ".join(map(str, dict.fromkeys(heads))) for name, heads in wrong.items()}
    counted = " and ".join(f"{value} ({name})" for name, value in numbers.items())
    return RankError(
        f"the attention heads can't be divided among {size} ranks: {counted}",
        facts={
            "model": getattr(config, "model_type", type(config).__name__),
            **numbers,
            "ranks": size,
            "sizes that fit": ", ".join(map(str, sizes)),
        },
        hint="start a number of ranks that fits, or load one model per rank, without tp_plan",
    )
