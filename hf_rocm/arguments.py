"""Argument checks that several public functions share."""

from __future__ import annotations

from hf_rocm.errors import OptionError


def require_module(model: object, function: str) -> None:
    """Raise `OptionError` unless `model` is a `torch.nn.Module`. function: the public function that was called."""
    from torch import nn

    if not isinstance(model, nn.Module):
        loaded = "load it first: model = hf_rocm.from_pretrained(…)" if isinstance(model, str) else None
        raise OptionError(
            f"{function} takes a model",
            facts={"expected": "a torch.nn.Module", "found": type(model).__qualname__},
            hint=loaded or "for a pipeline, pass its `.model`",
        )
