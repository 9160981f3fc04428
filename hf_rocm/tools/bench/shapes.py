"""Models of known shapes with random weights, to measure without a checkpoint.

Speed doesn't depend on the values of weights, except in expert routing: random weights spread tokens evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_rocm.errors import OptionError
from hf_rocm.tools.bench.known_shapes import shape


def build(name: str, *, device: torch.device, dtype: torch.dtype, layers: int | None = None) -> Any:
    """Create a stock model with this shape in eval mode, directly on the device and in `dtype`.

    layers: the number of layers, if it differs from the shape's. Raises `OptionError` for an unknown name, and if this
    release of transformers lacks the model.
    """
    cls, config = architecture(name, layers=layers)
    with default_dtype(dtype), torch.device(device):
        model = cls(config).eval()
    _fill(model)
    return model


def architecture(name: str, *, layers: int | None = None, **settings: Any) -> tuple[Any, Any]:
    """Return the model's class and a config with this shape.

    settings: values of the config that override those of the shape. Raises `OptionError` for an unknown name, and
    if this release of transformers lacks the model.
    """
    import transformers

    named = shape(name)
    cls, config_cls = getattr(transformers, named.model, None), getattr(transformers, named.config, None)
    if cls is None or config_cls is None:
        raise OptionError(
            f"transformers {transformers.__version__} has no {named.model}", hint="select another --config"
        )
    depth = {} if layers is None else {"num_hidden_layers": layers}
    return cls, config_cls(**{**named.settings, **depth, **settings})


def _fill(model: torch.nn.Module) -> None:
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, deviation(parameter.shape[-1]), generator=generator)


def deviation(inputs: int) -> float:
    """Return the standard deviation of weights that preserve the magnitude of their input.

    With larger weights, deep models would overflow.
    """
    return 1 / math.sqrt(inputs)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
