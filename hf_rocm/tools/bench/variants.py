"""The sides of a comparison: copies of one model that share its weights but run in different ways.

Because the weights are shared, two sides differ only in the code that runs, they take the memory of one model, and no
side needs a new warm-up after another one has run.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from hf_rocm import patches
from hf_rocm.errors import OptionError
from hf_rocm.overlay import bind

STOCK, COMPILE, OVERHEAD, LIGER = "stock", "compile", "reduce-overhead", "liger"
PREPARED, UNCAPTURED = "hf_rocm", "no-graphs"

# The sides with torch.compile use a static cache, as transformers does for a compiled decode step. Their mode is
# `default` unless the label names another one.
LABELS = {
    STOCK: "stock",
    COMPILE: "stock + torch.compile",
    OVERHEAD: "stock + torch.compile, reduce-overhead",
    LIGER: "stock + Liger-Kernel",
    UNCAPTURED: "hf_rocm without graphs",
    PREPARED: "hf_rocm",
}
DEFAULT = (STOCK, COMPILE, PREPARED)

# Sides that run a prefill in the same way as another side: transformers does not compile a prefill.
DECODE_ONLY = (COMPILE, OVERHEAD)

# The reason why such a side is left out of a case, and the wordings of this reason in older records.
NOT_DECODING = "it differs from another side only in decoding"
EARLIER_NOT_DECODING = ("it differs in decoding only", "it differs from another side in decoding only")


@dataclass
class Side:
    """One side.

    arguments: additional arguments of `generate`. turn: returns a context manager that is active while the side runs.
    forward: replaces the model's forward in calls without `generate`.
    """

    name: str
    model: Any
    arguments: dict[str, Any] = field(default_factory=dict)
    turn: Callable[[], AbstractContextManager[None]] = nullcontext
    forward: Callable[..., Any] | None = None

    def __call__(self, **inputs: Any) -> Any:
        return (self.forward or self.model)(**inputs)

    def release(self) -> None:
        """Release caches and recorded graphs."""
        # transformers before 5.15 keeps its static cache there.
        self.model.__dict__.pop("_cache", None)
        if self.name in (PREPARED, UNCAPTURED):
            _release_graphs(self.model)

    def note(self) -> str | None:
        """Return how the side ran, unless its name implies that."""
        if self.name != PREPARED:
            return None
        if all(bind.mode_of(module) == bind.OFF for module in self.model.modules()):
            return "no layer is served, and this side runs stock"
        notes = (_graph_note(self.model), _forwards_note(self.model))
        return "; ".join(note for note in notes if note is not None) or None

    def replay_alone(self) -> float | None:
        """Return the device time in ms of a replay of the last recorded step, or forward if there is no step.

        Returns None without a recording, and for sides other than hf_rocm.
        """
        return _replay_alone(self.model) if self.name == PREPARED else None

    def forget(self) -> None:
        """Like `release`, but also drop compiled code, so that the next shape isn't compiled with dynamic sizes."""
        self.release()
        if self.name in (COMPILE, OVERHEAD):
            self.model.__dict__.pop("_compiled_call", None)
            torch._dynamo.reset()


def _graph_note(model: Any) -> str | None:
    """Return how many steps were replayed, and why others were not; None if the model has no state."""
    from hf_rocm.generation import state

    return _note(state.known(model), "step", "uncaptured")


def _forwards_note(model: Any) -> str | None:
    """Return how many forwards or prompts were replayed, and why others were not; None if the model has no state."""
    from hf_rocm.forwards import state

    prompts = hasattr(model, "generate")
    return _note(state.known(model), *(("prompt", "prompts uncaptured") if prompts else ("forward", "uncaptured")))


def _note(known: Any, noun: str, uncaptured: str) -> str | None:
    if known is None:
        return None
    if known.disabled is not None:
        return f"{uncaptured}: {known.disabled}"
    turned_away = "; ".join(known.turned_away)
    return _replayed(known.replayed, noun) + (f"; {uncaptured}: {turned_away}" if turned_away else "")


def _replayed(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)} replayed"


# Consecutive replays that are timed together, so that the device never waits for the host.
_IN_A_ROW = 16


def _replay_alone(model: Any) -> float | None:
    from hf_rocm.forwards.state import known as known_forwards
    from hf_rocm.generation.state import known as known_steps
    from hf_rocm.tools.bench.clock import device_time, spread

    steps, forwards = known_steps(model), known_forwards(model)
    recording = None if steps is None else steps.pool.latest_recording()
    if recording is None and forwards is not None:
        recording = forwards.latest_recording()
    if recording is None:
        return None
    return spread(device_time([recording.replay_in_place] * _IN_A_ROW, model.device, record=False)).median


def sides(model: Any, names: list[str] | tuple[str, ...], *, encoder: bool) -> tuple[list[Side], dict[str, str]]:
    """Return the sides with these names for one stock model, and the reasons why others are unavailable.

    `model` itself becomes the model of the sides with hf_rocm, if any. Raises `OptionError` on an unknown name, or if
    Liger-Kernel does not support the model.
    """
    unknown = [name for name in names if name not in LABELS]
    if unknown:
        raise OptionError(f"there is no side {unknown[0]!r}", facts={"known": ", ".join(LABELS)})
    available, missing = [], {}
    silence(model)
    for name in names:
        reason = _missing(name, encoder=encoder)
        if reason is None:
            available.append(_MAKERS[name](name, model, encoder))
        else:
            missing[name] = reason
    if any(side.name in (PREPARED, UNCAPTURED) for side in available):
        from hf_rocm.loading.prepare import prepare

        prepare(model, force=True)
    return available, missing


def twin(model: Any) -> Any:
    """Return a copy of a stock model with the same parameter and buffer objects, so that it takes hardly any memory.

    If weights are fused in the model later, the copy uses the fused weights too. A prepared model can't be copied,
    because restoring the copy would take the shared parameters out of the fused blocks.
    """
    from hf_rocm.loading.prepare import REPORT, restore

    assert REPORT not in model.__dict__, "copies must be made before the model is prepared"
    shared = [*model.parameters(), *model.buffers()]
    return restore(copy.deepcopy(model, {id(tensor): tensor for tensor in shared}))


def _missing(name: str, *, encoder: bool) -> str | None:
    if name == LIGER and find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    if encoder and name == UNCAPTURED:
        return NOT_DECODING
    return None


def _stock(name: str, model: Any, encoder: bool) -> Side:
    return Side(name, twin(model))


def _compiled(name: str, model: Any, encoder: bool) -> Side:
    """Return stock as transformers compiles it by default: only the decode step, with a static cache. For an encoder,
    compile the forward pass.
    """
    mode = "default" if name == COMPILE else "reduce-overhead"
    copied = twin(model)
    if encoder:
        return Side(name, copied, forward=torch.compile(copied.forward, mode=mode))
    from transformers import CompileConfig

    settings: Any = CompileConfig(fullgraph=False, mode=mode)
    settings._compile_all_devices = True
    return Side(name, copied, {"cache_implementation": "static", "compile_config": settings})


def _prepared_side(name: str, model: Any, encoder: bool) -> Side:
    # the option that disables transformers' compiled step also disables recorded steps
    return Side(name, model, {"disable_compile": True} if name == UNCAPTURED else {})


def _liger(name: str, model: Any, encoder: bool) -> Side:
    """Return a copy with Liger's kernels. Liger's patches of transformers are active only while this side runs."""
    from liger_kernel.transformers import monkey_patch

    copied = twin(model)
    kind = getattr(copied.config, "model_type", "")
    apply = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if apply is None:
        raise OptionError(f"Liger-Kernel does not support {kind}", hint="omit the side liger")
    module = importlib.import_module(type(copied).__module__)
    before = dict(vars(module))
    apply(model=copied, cross_entropy=False, fused_linear_cross_entropy=False)
    patched = {key: value for key, value in vars(module).items() if before.get(key) is not value}
    for key, value in patched.items():
        patches.exchange(module, key, value, before.get(key, patches.ABSENT))
    changes = [patches.Change(module, key, partial(_replacement, value)) for key, value in patched.items()]
    return Side(name, copied, turn=lambda: patches.applied(*changes))


def _replacement(value: Any, _: patches.Change) -> Any:
    return value


_MAKERS: dict[str, Callable[[str, Any, bool], Side]] = {
    STOCK: _stock,
    COMPILE: _compiled,
    OVERHEAD: _compiled,
    LIGER: _liger,
    PREPARED: _prepared_side,
    UNCAPTURED: _prepared_side,
}


def silence(model: Any) -> None:
    """Make `generate` generate exactly the requested number of tokens, greedily."""
    settings = getattr(model, "generation_config", None)
    if settings is not None:
        settings.eos_token_id = None
        settings.pad_token_id = 0
        settings.do_sample = False
        settings.temperature = settings.top_p = settings.top_k = None


def _release_graphs(model: Any) -> None:
    from hf_rocm.forwards import state as forwards
    from hf_rocm.generation import state

    state.release(model)
    forwards.release(model)
