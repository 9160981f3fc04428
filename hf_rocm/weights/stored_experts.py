"""Routed experts of a quantised checkpoint, with the checkpoint's own tensors, which hf_rocm's kernels read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm import ops
from hf_rocm.ops.moe import MANY, ExpertsSpec
from hf_rocm.ops.moe_mxfp4 import Mxfp4Call, loop, specification
from hf_rocm.ops.mxfp4 import BLOCK, dequantize
from hf_rocm.weights.mxfp4 import DOWN, GATE_UP
from hf_rocm.weights.stored import StoredFormat, TensorInfo
from hf_rocm.weights.stored_linear import StoredLayer

_CLASS = ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")

# In the module's __dict__: a mark of prepared models, whose calls may use the kernels. `restore` removes it.
_PREPARED = "_hf_rocm_prepared"


class StoredExperts(StoredLayer):
    """Replaces `GptOssExperts` while a checkpoint in MXFP4 is loaded.

    Until the model is prepared, a call dequantises one expert after the other, which is slow.
    """

    def __init__(
        self, experts: Any, format: StoredFormat, infos: Mapping[str, TensorInfo], *, biased: bool = True
    ) -> None:
        super().__init__(format, infos, experts.gate_up_proj.dtype)
        self.gate_up_proj_bias, self.down_proj_bias = experts.gate_up_proj_bias, experts.down_proj_bias
        self.limit, self.alpha = float(experts.limit), float(experts.alpha)
        self.replaced = (experts,)  # in a tuple, so that it is not a child; its parameters stay on the meta device
        self.training = experts.training

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        return _is_experts(module)

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        return None

    @classmethod
    def sizes(cls, module: Any) -> tuple[int, ...]:
        """E, H and I."""
        return tuple(module.down_proj.shape[index] for index in (0, 2, 1))

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """hidden_states: [T, H] with routing_weights [T, k]; before transformers 5, [B, S, H] with [T, E]."""
        weights = routing_weights
        if hidden_states.dim() == 3 or weights.shape != router_indices.shape:
            weights = weights.gather(1, router_indices)
        call = self._call(hidden_states.flatten(0, -2), router_indices, weights)
        if _PREPARED not in self.__dict__:
            return loop(call).view_as(hidden_states)
        *tensors, limit, alpha = call
        return ops.mxfp4_experts(*tensors, limit=limit, alpha=alpha).view_as(hidden_states)

    def _call(self, x: Tensor, ids: Tensor, weights: Tensor) -> Mxfp4Call:
        stored = self.tensors()
        gate_up, down = (
            (stored[f"{name}_blocks"], stored[f"{name}_scales"], getattr(self, f"{name}_bias").to(x.dtype))
            for name in (GATE_UP, DOWN)
        )
        return Mxfp4Call(x, *gate_up, *down, ids, weights, self.limit, self.alpha)

    def use_kernels(self) -> None:
        """Use the fastest implementation in all following calls."""
        self.__dict__[_PREPARED] = True

    def ordinary(self) -> nn.Module:
        """Return the module that this one replaced, with dequantised weights in the model's dtype."""
        experts: nn.Module = self.replaced[0]
        stored = self.tensors()
        for name in (GATE_UP, DOWN):
            blocks, scales, bias = stored[f"{name}_blocks"], stored[f"{name}_scales"], getattr(self, f"{name}_bias")
            weight = torch.empty(
                (len(blocks), blocks.shape[2] * BLOCK, blocks.shape[1]), dtype=self.dtype, device=blocks.device
            )
            for expert, matrix in enumerate(weight):
                matrix.copy_(dequantize(blocks[expert], scales[expert], self.dtype).t())
            experts.register_parameter(name, nn.Parameter(weight, requires_grad=False))
            experts.register_parameter(f"{name}_bias", nn.Parameter(bias.detach().clone(), requires_grad=False))
        return experts.train(self.training)

    def extra_repr(self) -> str:
        experts, hidden, inputs = self.tensors()[f"{DOWN}_blocks"].shape[:3]
        return f"{experts} experts, {hidden} × {BLOCK * inputs}, {self.format.described()}"


def specifications(model: nn.Module) -> Iterator[tuple[str, ExpertsSpec]]:
    """Yield (situation, specification) for the calls of the prepared experts."""
    top = getattr(getattr(model, "config", None), "num_experts_per_tok", 1)
    for module in model.modules():
        if isinstance(module, StoredExperts) and _PREPARED in module.__dict__:
            device = module.tensors()[f"{DOWN}_blocks"].device
            x = torch.empty(0, dtype=module.dtype, device=device)
            ids = torch.empty(1, top)
            spec = ExpertsSpec(*specification(module._call(x, ids, x)))  # type: ignore[arg-type]
            sizes = f"{top} of {spec.experts}, {spec.hidden} × {spec.intermediate}"
            yield f"decode, {sizes}", spec
            yield f"prefill, {sizes}", spec._replace(pairs=MANY)


def _is_experts(module: nn.Module) -> bool:
    return (type(module).__module__, type(module).__qualname__) == _CLASS
