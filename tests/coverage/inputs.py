"""Inputs by kind of model, and the tensors of a result that are compared."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from tests.coverage.case import Case

IMAGE_START, IMAGE_END, VIDEO_TOKEN, IMAGE_TOKEN = 126, 127, 128, 129

LEFT = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
RIGHT = torch.tensor([[1] * 5 + [0] * 4, [1] * 9])


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 131, (batch, length), generator=torch.Generator().manual_seed(seed))


def pixels(batch: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(5), dtype=torch.float32).to(dtype)


def arguments(case: Case, model: Any, padding: torch.Tensor | None = None) -> dict[str, Any]:
    """The arguments of a call. padding: the attention mask of the text, [2, 9]."""
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    text = {"input_ids": tokens(2, 9)}
    if padding is not None:
        text["attention_mask"] = padding
    if case.kind in ("text", "encoder"):
        return text
    if case.kind == "seq2seq":
        return {**text, "decoder_input_ids": tokens(2, 6, seed=1)}
    if case.kind == "image":
        return {"pixel_values": pixels(2, 16, dtype)}
    # The patches of two images of different shapes.
    if case.kind == "patches":
        patches = torch.randn(2, 16, 3 * 4 * 4, generator=torch.Generator().manual_seed(5), dtype=torch.float32).to(
            dtype
        )
        present = torch.arange(16)[None] < torch.tensor([[16], [12]])
        shapes = torch.tensor([[4, 4], [3, 4]])
        return {"pixel_values": patches, "pixel_attention_mask": present.long(), "spatial_shapes": shapes}
    # Two images of different sizes, with four patches per token.
    if case.kind == "images in text":
        ids = text["input_ids"]
        ids[0, 2:6], ids[1, 3:5] = IMAGE_TOKEN, IMAGE_TOKEN
        ids[0, 1], ids[1, 2] = IMAGE_START, IMAGE_START
        patches = torch.randn(24, 96, generator=torch.Generator().manual_seed(5), dtype=torch.float32).to(dtype)
        call = {**text, "pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]])}
        parameters = inspect.signature(model.forward).parameters
        if "mm_token_type_ids" in parameters:
            call["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
        if "moe_mm_token_type_ids" in parameters:
            call["moe_mm_token_type_ids"] = ((ids == IMAGE_TOKEN) | (ids == IMAGE_START)).long()
        return call
    if case.kind == "towers":
        return {**text, "pixel_values": pixels(2, 16, dtype)}
    if case.kind == "image and text":
        image = torch.full((2, case.image_tokens), IMAGE_TOKEN)
        call = {"input_ids": torch.cat([image, text["input_ids"]], dim=1), "pixel_values": pixels(2, 16, dtype)}
        parameters = inspect.signature(model.forward).parameters
        if case.overlay == "mistral3":
            call["image_sizes"] = torch.tensor([[16, 16], [16, 16]])
        # A list of images per text, here with one image; the widths differ.
        if "pixel_attention_mask" in parameters:
            call["pixel_values"] = call["pixel_values"][:, None]
            call["pixel_attention_mask"] = torch.ones(2, 1, 16, 16, dtype=torch.long)
            call["pixel_attention_mask"][1, 0, :, 12:] = 0
        if "token_type_ids" in parameters:
            call["token_type_ids"] = (call["input_ids"] == IMAGE_TOKEN).long()
        return call
    if case.kind == "audio":
        features = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(6), dtype=torch.float32).to(dtype)
        return {"input_features": features, "decoder_input_ids": tokens(2, 6, seed=1)}
    raise AssertionError(f"{case.id}: unknown kind of inputs: {case.kind!r}")


@contextmanager
def in_float64() -> Iterator[None]:
    """Patch stock code that would use float32 in float64 models.

    Some masks are made in the default dtype, and the softmax of eager attention is computed in float32. Up to 5.1,
    CodeGen's scores are also in float32, where float64's minimum would overflow, so masks use float32's minimum.
    Position tables are interpolated in float32, at points in float64.
    """
    kept, stock, sample, finfo = torch.get_default_dtype(), functional.softmax, functional.grid_sample, torch.finfo
    fields = {name: getattr(finfo(torch.float64), name) for name in ("bits", "eps", "max", "tiny", "resolution")}
    double = SimpleNamespace(**fields, min=finfo(torch.float32).min)

    def limits(dtype: torch.dtype = kept) -> Any:
        return double if dtype == torch.float64 else finfo(dtype)

    def softmax(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        return stock(x, *args, dtype=None if x.dtype == torch.float64 else dtype, **kwargs)

    def grid_sample(x: torch.Tensor, grid: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return sample(x.double(), grid.double(), *args, **kwargs)

    torch.set_default_dtype(torch.float64)
    functional.softmax, functional.grid_sample = softmax, grid_sample
    torch.finfo = limits  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.finfo = finfo  # type: ignore[misc]
        torch.set_default_dtype(kept)
        functional.softmax, functional.grid_sample = stock, sample


def outputs(result: Any, keep: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The floating-point tensors among a model's outputs, and all hidden states, by name.

    Other nested outputs, such as attention weights, are omitted. keep: [B, S], the positions to compare. With it,
    tensors that don't begin with these dims are omitted, too.
    """
    named: dict[str, torch.Tensor] = {}
    for part, value in result.items():
        if torch.is_tensor(value) and value.is_floating_point():
            named[part] = value
        elif part.endswith("hidden_states") and isinstance(value, tuple):
            named.update({f"{part} {layer}": state for layer, state in enumerate(value) if torch.is_tensor(state)})
    if keep is None:
        return named
    return {part: value[keep] for part, value in named.items() if value.shape[:2] == keep.shape}
