"""Running a model once for each batch and prompt length, to see its products.

Without its weights, as far as that goes: the model is built from its config out of tensors that have a shape and no
memory, so that it needs neither the checkpoint nor a GPU.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rocm import options
from hf_rocm.errors import LoadError, OverlayError, TuningError
from hf_rocm.loader import _with_dtype
from hf_rocm.overlay import bind
from hf_rocm.tuning.shapes import Gemm, Recording, fusable

Progress = Callable[[int, int], None]

MAX_ANSWERS = 10_000  # truth values that a model without weights is given before it counts as hanging


def record(
    model: nn.Module, batches: Sequence[int], prompts: Sequence[int], *, progress: Progress | None = None
) -> list[Gemm]:
    """The products of a prefill of each [batch, prompt] and of a decode step of each batch, as `generate` runs them.

    Layers that the loader fuses count as one. Raises `TuningError` if the model takes no tokens.
    """
    runs = [(batch, prompt) for batch in batches for prompt in prompts]
    with Recording() as seen, torch.no_grad(), options.override(tiers={**options.current().tiers, "linear": "torch"}):
        for number, (batch, prompt) in enumerate(runs):
            if progress:
                progress(number, len(runs))
            _run(model, batch, prompt)
    return seen.shapes(list(_groups(model)))


@contextmanager
def without_weights(model: str, *, dtype: str | None = None) -> Iterator[nn.Module]:
    """The model of this folder or name, built without memory. Its tensors are good for `record` inside the block only.

    dtype: such as bfloat16, by default the checkpoint's. Raises `LoadError` if there is no config.
    """
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        config = transformers.AutoConfig.from_pretrained(model)
    except OSError as error:
        raise LoadError(
            f"no config could be loaded from {model!r}",
            facts={"transformers says": " ".join(str(error).split())[:300]},
            hint="check the name or the path; a folder needs its config.json",
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise TuningError(
            "this checkpoint is quantised, and its products are not those that are tuned here",
            facts={"model": model},
            hint="tune the checkpoint that it was made from, if you run that",
        )
    named = _named(dtype) if dtype else _dtype_of(config)
    cls = _class_for(model, config)
    with FakeTensorMode(allow_non_fake_inputs=True), _Answers():
        try:
            build = getattr(cls, "_from_config", None) or cls.from_config
            with _no_initial_values():
                built = build(config, **_with_dtype({"dtype": named})).eval()
            yield built
        except Exception as error:  # torch raises many kinds where a value would be needed
            if type(error).__module__.partition(".")[0] != "torch" and not isinstance(error, RuntimeError):
                raise
            raise TuningError(
                f"{cls.__name__} can't be followed without its weights",
                facts={"torch says": " ".join(str(error).split())[:200] or type(error).__name__},
                hint="load it: add --load",
            ) from error


@contextmanager
def loaded(model: str, *, dtype: str | None = None) -> Iterator[nn.Module]:
    """The model itself, on the GPU if there is one."""
    from hf_rocm.diagnostics.load import load

    found = load(model)
    yield found.to(_named(dtype)) if dtype else found


def _named(dtype: str) -> torch.dtype:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise TuningError(f"there is no dtype {dtype!r}", hint="name bfloat16 or float16")
    return found


class _Answers(TorchDispatchMode):
    """Says yes where a model asks for a truth value: masks of all ones are what generate starts with."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            self.given += 1
            if self.given > MAX_ANSWERS:
                raise RuntimeError("a loop waits for a value that only the weights would give")
            return True
        return func(*args, **(kwargs or {}))


def _run(model: Any, batch: int, prompt: int) -> None:
    config = model.config
    if model.main_input_name != "input_ids":
        raise TuningError(
            f"{type(model).__name__} takes {model.main_input_name}, and only models of tokens are run here",
            hint="record your own call with hf_rocm.tuning.shapes.Recording, and give the file as --shapes",
        )
    ids = torch.ones(batch, prompt, dtype=torch.long, device=next(model.parameters()).device)
    arguments: dict[str, Any] = {}
    generates = model.can_generate() and hasattr(config, "use_cache")
    if generates:
        arguments["use_cache"] = True
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            arguments["logits_to_keep"] = 1
    one = ids[:, :1]
    if config.is_encoder_decoder:
        first = model(input_ids=ids, decoder_input_ids=one, **arguments)
        arguments["encoder_outputs"] = (first.encoder_last_hidden_state,)
        step = {"decoder_input_ids": one}
    else:
        first = model(input_ids=ids, **arguments)
        step = {"input_ids": one}
    cache = getattr(first, "past_key_values", None)
    if generates and cache is not None:
        model(**step, past_key_values=cache, **arguments)


def _groups(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Layers that the loader fuses where it prepares this model."""
    from hf_rocm.overlay import catalog
    from hf_rocm.overlay.activate import activate
    from hf_rocm.weights.prepare import families

    for name in sorted(families(model) & set(catalog.load().models())):
        try:
            activate(name, everywhere=False)
        except OverlayError:
            continue  # refused for this release: such layers run one by one
    for module in model.modules():
        binding = bind.binding_of(module)
        if binding is not None and binding.fuses:
            group = tuple(module._modules.get(name) for name in binding.fuses)
            if fusable(group):
                yield group


def _class_for(model: str, config: Any) -> Any:
    import transformers

    from hf_rocm.loader import _class_for as of_checkpoint

    cls = of_checkpoint(model, None, {"config": config})
    return cls._model_mapping[type(config)] if cls is transformers.AutoModelForCausalLM else cls


def _no_initial_values() -> Any:
    """transformers' own switch: some initial values are drawn until they lie in a range, which shapes never do."""
    try:
        module = importlib.import_module("transformers.initialization")
    except ModuleNotFoundError:  # before 5.0
        module = importlib.import_module("transformers.modeling_utils")
    return module.no_init_weights()


def _dtype_of(config: Any) -> torch.dtype:
    """The dtype that the checkpoint says it has, also in the text part of a larger config."""
    parts = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    for part in parts:
        found = getattr(part, "dtype", None) or getattr(part, "torch_dtype", None)
        if isinstance(found, str):
            found = getattr(torch, found, None)
        if isinstance(found, torch.dtype):
            return found
    return torch.float32
