"""Routed experts in MXFP4: the forward of experts that were loaded from a checkpoint or quantised by `quantize`.

Rows of gate and up alternate, as in gpt-oss.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hf_rocm import ops
from hf_rocm.ops.moe import MANY
from hf_rocm.ops.moe_mxfp4 import loop, specification
from hf_rocm.ops.specs.experts import ExpertsSpec, Mxfp4Call

GATE_UP, DOWN = "gate_up_proj", "down_proj"


class Mxfp4Experts(nn.Module):
    """Replaces a module that transformers calls with rows, the ids of their experts, and routing weights."""

    dtype: torch.dtype
    # Activation, limit and alpha: as in `ops.experts`.
    activation: str
    limit: float
    alpha: float
    # Whether the input is moved to this layer's device, as accelerate did for the replaced module.
    follows = False

    def packed(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """(blocks, scales, bias) of `GATE_UP` or `DOWN`, as in `ops.mxfp4_experts`."""
        raise NotImplementedError

    @property
    def prepared(self) -> bool:
        """Whether calls may use the kernels. Otherwise they dequantise one expert after another, which is slow."""
        return True

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """hidden_states: [T, H]; router_indices, routing_weights: [T, k], for T tokens with k experts each.

        Before transformers 5, hidden_states has the shape [B, S, H], and routing_weights [T, E]. Returns a tensor
        with the shape of hidden_states.
        """
        weights = routing_weights
        if self.follows:
            device = self.packed(DOWN)[0].device
            hidden_states, router_indices, weights = (
                tensor.to(device) for tensor in (hidden_states, router_indices, weights)
            )
        if hidden_states.dim() == 3 or weights.shape != router_indices.shape:
            weights = weights.gather(1, router_indices)
        call = self._call(hidden_states.flatten(0, -2), router_indices, weights)
        if not self.prepared:
            return loop(call).view_as(hidden_states)
        output = ops.mxfp4_experts(*call[:9], activation=call.activation, limit=call.limit, alpha=call.alpha)
        return output.view_as(hidden_states)

    def _call(self, x: Tensor, ids: Tensor, weights: Tensor) -> Mxfp4Call:
        first, second = self._packed_for(GATE_UP, x), self._packed_for(DOWN, x)
        return Mxfp4Call(x, *first, *second, ids, weights, self.activation, self.limit, self.alpha)

    def _packed_for(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        blocks, scales, bias = self.packed(name)
        return blocks, scales, None if bias is None else bias.to(x.dtype)

    def specification(self, top_k: int) -> ExpertsSpec:
        """The specification of a call with one token, which uses `top_k` experts."""
        x = torch.empty(0, dtype=self.dtype, device=self.packed(DOWN)[0].device)
        return ExpertsSpec(*specification(self._call(x, torch.empty(1, top_k), x)))  # type: ignore[arg-type]


def specifications(model: nn.Module) -> Iterator[tuple[str, ExpertsSpec]]:
    """Yield (situation, specification) for the calls of the prepared experts."""
    top_k = getattr(getattr(model, "config", None), "num_experts_per_tok", 1)
    for module in model.modules():
        if isinstance(module, Mxfp4Experts) and module.prepared:
            spec = module.specification(top_k)
            sizes = f"{top_k} of {spec.experts}, {spec.hidden} × {spec.intermediate}"
            yield f"decode, {sizes}", spec
            yield f"prefill, {sizes}", spec._replace(pairs=MANY)
