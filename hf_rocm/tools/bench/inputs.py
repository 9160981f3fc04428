"""The inputs of a comparison: random tokens or pixels, which are the same for every side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_rocm.tools.bench.cases import Case


def tokens(model: Any, batch: int, length: int) -> Tensor:
    """Return random ids, [B, S], on the model's device. The lowest ids are excluded, because they are often special."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    generator = torch.Generator().manual_seed(batch * 1000003 + length)
    return torch.randint(10, config.vocab_size, (batch, length), generator=generator).to(model.device)


def forward_inputs(model: Any, case: Case) -> dict[str, Any]:
    """Return the arguments of one forward pass, which is a prefill or an encoder's pass."""
    if case.kind == "prefill":
        ids = tokens(model, case.batch, case.prompt)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "logits_to_keep": 1}
    if case.prompt:
        ids = tokens(model, case.batch, case.prompt)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    size = model.config.image_size
    channels = getattr(model.config, "num_channels", 3)
    pixels = torch.randn(case.batch, channels, size, size, generator=torch.Generator().manual_seed(case.batch))
    return {"pixel_values": pixels.to(model.device, next(model.parameters()).dtype)}


def output(result: Any) -> Tensor:
    """Return the tensor to compare from the output of a forward pass."""
    tensor: Tensor = result.logits if getattr(result, "logits", None) is not None else result.last_hidden_state
    return tensor
