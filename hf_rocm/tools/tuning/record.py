"""Run a model for every combination of batch size and prompt length, and record its GEMMs.

By default, the model is built from its config with fake tensors, which have a shape but no memory, so that neither the
checkpoint nor a GPU is needed.
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
from hf_rocm.loading.pretrained import _with_dtype
from hf_rocm.overlay import bind
from hf_rocm.tools.load import loading
from hf_rocm.tools.tuning.shapes import Gemm, Recording, fusable

Progress = Callable[[int, int], None]

# The largest number of truth values that a model without weights may read; more indicate an endless loop.
MAX_READS = 10_000


def record(
    model: nn.Module, batches: Sequence[int], prompts: Sequence[int], *, progress: Progress | None = None
) -> list[Gemm]:
    """Return the GEMMs of a prefill and a decode step as in `generate`, for every combination of batch and prompt.

    A model that does not generate runs a single forward pass. Layers that the loader fuses count as one. Raises
    `TuningError` if the model does not take tokens.
    """
    runs = [(batch, prompt) for batch in batches for prompt in prompts]
    with (
        Recording() as recording,
        torch.no_grad(),
        options.override(tiers={**options.current().tiers, "linear": "torch"}),
    ):
        for number, (batch, prompt) in enumerate(runs):
            if progress:
                progress(number, len(runs))
            _run(model, batch, prompt)
    return recording.shapes(list(_groups(model)))


@contextmanager
def without_weights(model: str, *, dtype: str | None = None) -> Iterator[nn.Module]:
    """Build the model in this folder or with this name, without allocating memory. It is valid only within the block.

    dtype: the name of a dtype, such as bfloat16; by default the checkpoint's dtype. Raises `LoadError` if there is no
    config, and `TuningError` if there is no such dtype, the checkpoint is quantised, or the model can't be traced.
    """
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with loading(model):
            config = transformers.AutoConfig.from_pretrained(model)
    except LoadError:
        raise
    except OSError as error:
        raise LoadError(
            f"no config could be loaded from {model!r}",
            facts={"transformers error": " ".join(str(error).split())[:300]},
            hint="check the name or the path; the folder must contain config.json",
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise TuningError(
            "this checkpoint is quantised, and quantised GEMMs are not tuned here",
            facts={"model": model},
            hint="if you run the original checkpoint, tune that one",
        )
    named = _named(dtype) if dtype else _dtype_of(config)
    cls = _class_for(model, config)
    with FakeTensorMode(allow_non_fake_inputs=True), _AllTrue():
        try:
            build = getattr(cls, "_from_config", None) or cls.from_config
            with _no_initial_values():
                built = build(config, **_with_dtype({"dtype": named})).eval()
            yield built
        except Exception as error:
            # torch raises exceptions of many types if code needs the value of a fake tensor.
            if type(error).__module__.partition(".")[0] != "torch" and not isinstance(error, RuntimeError):
                raise
            raise TuningError(
                f"{cls.__name__} cannot be traced without its weights",
                facts={"torch error": " ".join(str(error).split())[:200] or type(error).__name__},
                hint="add --load to load the weights",
            ) from error


@contextmanager
def loaded(model: str, *, dtype: str | None = None) -> Iterator[nn.Module]:
    """Load the model with its weights, on the GPU if there is one."""
    from hf_rocm.tools.load import load

    instance = load(model)
    yield instance.to(_named(dtype)) if dtype else instance


def _named(dtype: str) -> torch.dtype:
    named = getattr(torch, dtype, None)
    if not isinstance(named, torch.dtype):
        raise TuningError(f"there is no dtype {dtype!r}", hint="use bfloat16 or float16")
    return named


class _AllTrue(TorchDispatchMode):
    """Return True for every bool that is read from a fake tensor. The masks are all ones, as when `generate` starts."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            self.reads += 1
            if self.reads > MAX_READS:
                raise RuntimeError("a loop depends on a value that needs the weights")
            return True
        return func(*args, **(kwargs or {}))


def _run(model: Any, batch: int, prompt: int) -> None:
    config = model.config
    if model.main_input_name != "input_ids":
        raise TuningError(
            f"{type(model).__name__} takes {model.main_input_name}, but only models that take tokens are supported",
            hint="record your own call with hf_rocm.tools.tuning.shapes.Recording, and pass the file as --shapes",
        )
    ids = torch.ones(batch, prompt, dtype=torch.long, device=next(model.parameters()).device)
    arguments: dict[str, Any] = {}
    uses_cache = model.can_generate() and hasattr(config, "use_cache")
    if uses_cache:
        arguments["use_cache"] = True
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            arguments["logits_to_keep"] = 1
    token = ids[:, :1]
    if config.is_encoder_decoder:
        first = model(input_ids=ids, decoder_input_ids=token, **arguments)
        arguments["encoder_outputs"] = (first.encoder_last_hidden_state,)
        step = {"decoder_input_ids": token}
    else:
        first = model(input_ids=ids, **arguments)
        step = {"input_ids": token}
    cache = getattr(first, "past_key_values", None)
    if uses_cache and cache is not None:
        model(**step, past_key_values=cache, **arguments)


def _groups(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield the groups of layers that the loader fuses in this model."""
    from hf_rocm.loading.prepare import families
    from hf_rocm.overlay import catalog
    from hf_rocm.overlay.activate import activate

    for name in sorted(families(model) & set(catalog.load().models())):
        try:
            activate(name, everywhere=False)
        except OverlayError:
            # The overlay is refused for this release, so its layers are not fused.
            continue
    for module in model.modules():
        binding = bind.binding_of(module)
        if binding is not None and binding.fuses:
            group = tuple(module._modules.get(name) for name in binding.fuses)
            if fusable(group):
                yield group


def _class_for(model: str, config: Any) -> Any:
    import transformers

    from hf_rocm.loading.pretrained import _class_for as of_checkpoint

    cls = of_checkpoint(model, None, {"config": config})
    return cls._model_mapping[type(config)] if cls is transformers.AutoModelForCausalLM else cls


def _no_initial_values() -> Any:
    """Return a context manager that disables weight initialisation.

    With fake tensors, sampling until all values lie in a range would never end.
    """
    try:
        module = importlib.import_module("transformers.initialization")
    except ModuleNotFoundError:
        # Before 5.0, transformers defines `no_init_weights` here.
        module = importlib.import_module("transformers.modeling_utils")
    return module.no_init_weights()


def _dtype_of(config: Any) -> torch.dtype:
    """Return the dtype in the checkpoint's config, or in the text part of the config; fp32 if neither has one."""
    parts = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    for part in parts:
        dtype = getattr(part, "dtype", None) or getattr(part, "torch_dtype", None)
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype, None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return torch.float32
