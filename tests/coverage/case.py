"""One row of the table of served models: how to build a tiny model, and the forwards that must serve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from tests.releases import RELEASE

# Small, but with two query heads per key head, two layers, and distinct sizes of vocabulary, hidden states and MLPs.
SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, eq=False)
class Case:
    """A tiny configuration of a model type, with optional features of its family enabled.

    overlay: the folder of the stock file. model, config: class names in transformers. arguments: the config's
    arguments; a callable receives the transformers module (for nested configs). attention: the stock classes whose
    forward is replaced; each must be called in every layer that has it. older: maps a version to these classes in the
    releases before it. since, until: the first release to which the case applies, and the first later one to which it
    does not. kind: the kind of inputs, see `inputs.py`. experts: for a mixture-of-experts model, maps a version to the
    stock class whose forward runs the experts in the releases before it.
    """

    overlay: str
    model: str
    config: str
    arguments: Any = field(default_factory=dict)
    attention: tuple[str, ...] = ()
    older: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    since: str = "4.53"
    until: str = "99"
    kind: str = "text"
    experts: Mapping[str, str] = field(default_factory=dict)
    # A mixture-of-experts model whose experts stay stock.
    experts_stay_stock: bool = False
    # Added to the seed of the random weights.
    seed: int = 0
    # Tokens per image of 16 × 16 pixels, for kind "image and text".
    image_tokens: int = 16
    # The name of a further configuration of the same overlay.
    variant: str = ""
    # scenarios that are skipped because stock itself can't run them, with the reason
    unsupported_by_stock: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.overlay}-{self.variant}" if self.variant else self.overlay

    @property
    def applies(self) -> bool:
        """Whether the case applies to the installed release."""
        return self.runs_in(RELEASE)

    def runs_in(self, release: Version) -> bool:
        """Whether the case applies to a release."""
        return Version(self.since) <= release < Version(self.until)

    def classes(self) -> tuple[str, ...]:
        """The attention classes whose forward must be called in the installed release."""
        for below in sorted(self.older, key=Version):
            if Version(below) > RELEASE:
                return self.older[below]
        return self.attention

    def moe_class(self) -> str | None:
        """The class whose replaced forward must run the experts in the installed release, or None."""
        below = [expert for expert in sorted(self.experts, key=Version) if Version(expert) > RELEASE]
        return self.experts[below[0]] if below else None

    def has_routed_experts(self) -> bool:
        """Whether the case declares routed experts for the installed release, served or stock."""
        return self.experts_stay_stock or self.moe_class() is not None

    def build(self, dtype: torch.dtype = torch.float32) -> Any:
        """A stock model with weights large enough that every part affects the output."""
        arguments = self.arguments(transformers) if callable(self.arguments) else dict(self.arguments)
        config = getattr(transformers, self.config)(**arguments)
        torch.manual_seed(len(self.id) + self.seed)
        model = getattr(transformers, self.model)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.is_floating_point():
                    continue
                # Norms and biases: add noise to the initial values.
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.normal_(0, 0.15)
        model.tie_weights()
        model = model.to(dtype).eval()
        # from_pretrained keeps these in fp32.
        kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if any(f".{part}." in f".{name}." for part in kept):
                tensor.data = tensor.data.float()
        return model


def params(cases: list[Case], without: str | None = None) -> Any:
    """Parametrise a test with the cases of this release.

    without: a scenario; cases that stock can't run in it are omitted.
    """
    chosen = [case for case in cases if case.applies and without not in case.unsupported_by_stock]
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in chosen])
