"""The model under test: its parts, and how to run its stock forwards.

There is only one model in memory. Stock runs with the same modules and parameters and with all dispatchers disabled, so
a fused weight that no longer matches its parameters is detected. A model whose weights were shuffled in place or whose
layers were routed is restored first, and prepared again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm.errors import VerifyError
from hf_rocm.loading.prepare import REPORT, prepare, restore
from hf_rocm.overlay import bind
from hf_rocm.tools.verify.wide_reference import wide_of, widened
from hf_rocm.weights import quantize

_PREFIX, _KEPT = "_hf_rocm_", (REPORT, bind.MODE)

DECODER, ENCODER, PAIR = "decoder", "encoder", "encoder-decoder"


class Subject:
    """A loaded model and the facts that the checks need.

    blocks: path → repeated layer, in order. outside: path → other module with weights.
    """

    def __init__(self, model: nn.Module) -> None:
        first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
        if first is None or quantize.summary(model) is not None:
            raise VerifyError(
                f"{type(model).__name__} has no floating-point weights, so there is no reference"
                if first is None
                else f"{type(model).__name__} is quantised, which changes its results on purpose",
                hint="verify it before it is quantised; hf_rocm.quantization_loss measures its error afterwards",
            )
        if any(parameter.is_meta for parameter in model.parameters()):
            raise VerifyError(
                "weights of this model are not in memory (meta)", hint="load it without offloading to verify it"
            )
        from hf_rocm.generation.decide import generator_of

        self.model = model
        # The model whose steps are recorded.
        self.generator: Any = generator_of(model)
        self.config: Any = model.config
        self.device = first.device
        self.dtype = first.dtype
        self.wide = wide_of(first.dtype)
        self.blocks = _blocks(model)
        self.outside = _outside(model, self.blocks)
        self.kind = _kind(model)

    @property
    def text_config(self) -> Any:
        whole = getattr(self.config, "get_text_config", None)
        return self.config if whole is None else whole()

    @contextmanager
    def stock(self, *, plain: bool = True) -> Iterator[None]:
        """Run stock's forwards within the block. plain: replace configured attention and experts with eager ones."""
        report = self.model.__dict__.get(REPORT) or {}
        if _replaced(report):
            restore(self.model)
        modes = {module: module.__dict__.get(bind.MODE) for module in self._bound()}
        for module in modes:
            bind.set_mode(module, bind.OFF)
        # The attributes to remove include those that `generate` reads, such as recorded steps.
        own = self.generator.__dict__
        marks = {name: own.pop(name) for name in list(own) if name.startswith(_PREFIX) and name not in _KEPT}
        try:
            with _plain(self.model) if plain else nullcontext():
                yield
        finally:
            own.update(marks)
            for module, mode in modes.items():
                bind.set_mode(module, mode)
            if _replaced(report):
                prepare_again(self.model, report)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Run stock in the wider dtype within the block."""
        with self.stock(), widened(self.model, self.blocks, self.wide):
            yield

    def final(self, output: Any) -> Tensor:
        """Return the part of the model's output to compare: its logits, or its last hidden states."""
        for name in ("logits", "last_hidden_state"):
            value = getattr(output, name, None)
            if isinstance(value, Tensor):
                return value
        raise VerifyError(
            f"{type(self.model).__name__} returns neither logits nor hidden states",
            hint="load the model with its head, such as AutoModelForCausalLM",
        )

    def _bound(self) -> list[nn.Module]:
        return [module for module in self.model.modules() if bind.binding_of(module) is not None]


def prepare_again(model: nn.Module, report: dict[str, Any]) -> None:
    """Prepare a restored model with the settings in the report of the earlier `prepare`."""
    preshuffle, routed = report["preshuffle"], report["routed"]
    prepare(
        model,
        force=True if report["forced"] else None,
        preshuffle=preshuffle.get("mode"),
        budget=preshuffle.get("budget"),
        linear_backend=routed and routed["backend"],
        graphs=report["graphs"]["requested"],
    )


def _replaced(report: dict[str, Any]) -> bool:
    """Return whether prepare made changes that affect stock forwards: replaced weights or routed layers."""
    preshuffle = report.get("preshuffle") or {}
    return bool(report.get("routed") or (preshuffle.get("shuffled") and not preshuffle.get("threshold")))


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost elements of module lists that have weights: the layers, without the modules inside them."""
    blocks: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{block}.") for block in blocks):
            for name, child in module.named_children():
                if any(True for _ in child.parameters()):
                    blocks[f"{path}.{name}"] = child
    return blocks


def _outside(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules with weights outside the blocks: embeddings, the last norm, the head."""
    return {
        path: module
        for path, module in model.named_modules()
        if module._parameters and path and not any(f"{path}.".startswith(f"{block}.") for block in blocks)
    }


def _kind(model: nn.Module) -> str:
    if "input_ids" not in _parameters(model.forward):
        raise VerifyError(
            f"{type(model).__name__} takes no input_ids, and verify needs a text model",
            hint="verify the language model inside it, for example hf_rocm.verify(model.model.language_model)",
        )
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        return PAIR
    can_generate: Callable[[], bool] | None = getattr(model, "can_generate", None)
    if can_generate is not None and can_generate():
        return DECODER
    attentions = [module for module in model.modules() if "Attention" in type(module).__name__]
    return DECODER if any(getattr(attention, "is_causal", False) for attention in attentions) else ENCODER


def _parameters(function: Callable[..., Any]) -> list[str]:
    import inspect

    return list(inspect.signature(function).parameters)


@contextmanager
def _plain(model: nn.Module) -> Iterator[None]:
    """Select eager attention and experts in every config of the model within the block."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    names = ("_attn_implementation_internal", "_experts_implementation_internal")
    own = [(config, name, vars(config)[name]) for config in configs.values() for name in names if name in vars(config)]
    try:
        for config, name, _ in own:
            setattr(config, name, "eager")
        yield
    finally:
        for config, name, value in own:
            setattr(config, name, value)


def is_causal_lm(subject: Subject) -> bool:
    """Return whether the model is a decoder that generates text."""
    can_generate: Any = getattr(subject.model, "can_generate", None)
    return subject.kind == DECODER and can_generate is not None and bool(can_generate())


def device_name(device: torch.device) -> str:
    """Return the name of the device, without the name of the machine."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
