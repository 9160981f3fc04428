"""Routed experts of a quantised checkpoint, with the checkpoint's own tensors, which hf_rocm's kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm.ops.mxfp4 import BLOCK, dequantize
from hf_rocm.ops.pointwise import CLAMPED
from hf_rocm.weights.mxfp4_experts import DOWN, GATE_UP, Mxfp4Experts
from hf_rocm.weights.stored import StoredFormat, TensorInfo
from hf_rocm.weights.stored_linear import StoredLayer

_CLASS = ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")

# In the module's __dict__: a flag that marks prepared models, whose calls may use the kernels. `restore` removes it.
_PREPARED = "_hf_rocm_prepared"


class StoredExperts(Mxfp4Experts, StoredLayer):
    """Replaces `GptOssExperts` when a checkpoint in MXFP4 is loaded."""

    def __init__(
        self, experts: Any, format: StoredFormat, infos: Mapping[str, TensorInfo], *, biased: bool = True
    ) -> None:
        super().__init__(experts, format, infos, experts.gate_up_proj.dtype)
        self.gate_up_proj_bias, self.down_proj_bias = experts.gate_up_proj_bias, experts.down_proj_bias
        self.activation, self.limit, self.alpha = CLAMPED, float(experts.limit), float(experts.alpha)
        # PyTorch does not register a module in a tuple as a child. Its parameters stay on the meta device.
        self.replaced = (experts,)

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        return _is_experts(module)

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        return None

    @classmethod
    def sizes(cls, module: Any) -> tuple[int, ...]:
        """The number of experts, the hidden size and the intermediate size."""
        return tuple(module.down_proj.shape[index] for index in (0, 2, 1))

    def packed(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        stored = self.tensors()
        return stored[f"{name}_blocks"], stored[f"{name}_scales"], getattr(self, f"{name}_bias")

    @property
    def prepared(self) -> bool:
        return _PREPARED in self.__dict__

    def use_kernels(self) -> None:
        """Use the fastest implementation in all following calls, until `restore`."""
        self.__dict__[_PREPARED] = True

    def ordinary(self) -> nn.Module:
        """Return the module that this one replaced, with dequantised weights in the model's dtype."""
        experts: nn.Module = self.replaced[0]
        for name in (GATE_UP, DOWN):
            blocks, scales, bias = self.packed(name)
            assert bias is not None
            weight = torch.empty(
                (len(blocks), blocks.shape[2] * BLOCK, blocks.shape[1]), dtype=self.dtype, device=blocks.device
            )
            for expert, matrix in enumerate(weight):
                matrix.copy_(dequantize(blocks[expert], scales[expert], self.dtype).t())
            experts.register_parameter(name, nn.Parameter(weight, requires_grad=False))
            experts.register_parameter(f"{name}_bias", nn.Parameter(bias.detach().clone(), requires_grad=False))
        return experts

    def extra_repr(self) -> str:
        experts, hidden, inputs = self.tensors()[f"{DOWN}_blocks"].shape[:3]
        return f"{experts} experts, {hidden} × {BLOCK * inputs}, {self.format.described()}"


def _is_experts(module: nn.Module) -> bool:
    return (type(module).__module__, type(module).__qualname__) == _CLASS
