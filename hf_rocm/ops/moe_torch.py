"""Routed experts in PyTorch: one grouped product per layer, a batched one for few tokens, and loops.

The gathered and the grouped form read nothing back from the device, so that they can be recorded in a graph (the
grouped one where PyTorch has a kernel for the dtype, bf16 on recent GPUs; else it counts on the host). Both loops do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from hf_rocm.ops.activation import act_and_mul, one_kernel

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.moe import ExpertsSpec

FEW = 32  # T · k up to which copying the chosen experts' weights beats a grouped product on a GPU

_grouped_mm: Callable[..., Tensor] | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class Form(NamedTuple):
    """How the weights are laid out and what happens between the two products; see `hf_rocm.ops.experts`."""

    activation: str
    transposed: bool
    interleaved: bool
    weigh_input: bool
    limit: float
    alpha: float

    def gate(self, h: Tensor) -> Tensor:
        """[..., 2I] to [..., I]."""
        gate, up = (h[..., ::2], h[..., 1::2]) if self.interleaved else h.chunk(2, dim=-1)
        function = ACTIVATIONS[self.activation]
        if function is not None:
            return function(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    def gate_at_once(self, h: Tensor) -> Tensor:
        """The same in one kernel, where there is one."""
        if is_compiling() or not one_kernel(h, activation=self.activation, interleaved=self.interleaved):
            return self.gate(h)
        return act_and_mul(
            h, activation=self.activation, interleaved=self.interleaved, limit=self.limit, alpha=self.alpha
        )


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "clamped_swiglu": None,
}


def grouped_refuses(spec: ExpertsSpec, device: Device) -> str | None:
    if _grouped_mm is None:
        return f"PyTorch {torch.__version__} has no grouped_mm"
    if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16) or spec.weight_dtype != spec.dtype:
        return f"grouped_mm is for fp32, bf16 and fp16, one dtype; got {spec.dtype} and {spec.weight_dtype}"
    if spec.traced and spec.dtype != torch.bfloat16:
        return f"the compiler lowers grouped_mm for bf16 only, not for {spec.dtype}"
    for name, size in (("hidden", spec.hidden), ("intermediate", spec.intermediate)):
        if size * spec.dtype.itemsize % 16:
            return f"grouped_mm needs rows of a multiple of 16 bytes, and the {name} size is {size}"
    if not spec.contiguous:
        return "the weights aren't contiguous"
    return None


def grouped(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    form: Form,
) -> Tensor:
    """Pairs of a token and an expert, sorted by expert, through two grouped products. Differentiable."""
    order = _Order(ids, gate_up.shape[0])
    if not ids.numel():
        return x * 1
    ends = torch.searchsorted(order.sorted_ids, order.all_ids, right=True, out_int32=True)

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert _grouped_mm is not None
        out = _grouped_mm(rows, weight if form.transposed else weight.transpose(1, 2), offs=ends)
        return out if bias is None else out + bias[order.sorted_ids]

    rows, row_weights = order.rows(x, weights, form)
    out = product(form.gate_at_once(product(rows, gate_up, gate_up_bias)), down, down_bias)
    return order.sum(out, row_weights, x.dtype)


class _Order:
    """The pairs (token, expert) in the order of experts, and the way back."""

    def __init__(self, ids: Tensor, experts: int) -> None:
        self.tokens, self.top = ids.shape
        self.sorted_ids, self.places = ids.flatten().sort(stable=True)
        self.all_ids = torch.arange(experts, device=ids.device, dtype=ids.dtype)

    def rows(self, x: Tensor, weights: Tensor, form: Form) -> tuple[Tensor, Tensor | None]:
        """x [S, H] in that order, and the weights [S] that are still to be applied."""
        rows, row_weights = x[self.places // self.top], weights.flatten()[self.places]
        if form.weigh_input:
            return (rows * row_weights[:, None]).to(x.dtype), None
        return rows, row_weights

    def sum(self, out: Tensor, row_weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The outputs [S, H], weighted, back in the order of tokens and summed: [T, H]."""
        if row_weights is not None:
            out = out * row_weights[:, None]
        back = torch.empty_like(self.places)
        back[self.places] = torch.arange(len(self.places), device=back.device)
        return out[back].view(self.tokens, self.top, -1).sum(1).to(dtype)


def gathered_refuses(spec: ExpertsSpec, device: Device) -> str | None:
    if device.kind == "cpu":
        return "on a CPU copying the chosen experts' weights costs more than the loop"
    if not 0 < spec.pairs <= FEW:
        return f"there are more than {FEW} pairs of a token and an expert: copying each one's weights costs too much"
    if spec.grad:
        return "gradients would go through copies of the weights"
    if spec.weight_dtype != spec.dtype:
        return f"it needs one dtype, got {spec.dtype} and {spec.weight_dtype}"
    return None


def gathered(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    form: Form,
) -> Tensor:
    """Few tokens: each pair's weights are copied out and multiplied in one batch."""
    (tokens, top), chosen = ids.shape, ids.flatten()
    rows = x[:, None].expand(tokens, top, x.shape[1]).reshape(tokens * top, 1, x.shape[1])
    scales = weights.reshape(-1, 1)
    if form.weigh_input:
        rows = (rows * scales[..., None]).to(x.dtype)

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        its = weight[chosen]
        out = torch.bmm(rows, its if form.transposed else its.transpose(1, 2))
        return out if bias is None else out + bias[chosen][:, None]

    out = product(form.gate_at_once(product(rows, gate_up, gate_up_bias)), down, down_bias).squeeze(1)
    if not form.weigh_input:
        out = out * scales
    return out.view(tokens, top, -1).sum(1).to(x.dtype)


def sorted_loop(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    form: Form,
) -> Tensor:
    """The same order as `grouped`, one product for each expert that was chosen; one read-back from the device."""
    order = _Order(ids, gate_up.shape[0])
    if not ids.numel():
        return x * 1
    rows, row_weights = order.rows(x, weights, form)
    chosen, counts = torch.unique_consecutive(order.sorted_ids, return_counts=True)
    read: list[list[int]] = torch.stack((chosen.to(counts.dtype), counts)).tolist()
    parts = []
    for expert, part in zip(read[0], rows.split(read[1]), strict=True):
        parts.append(_one(part, expert, gate_up, down, gate_up_bias, down_bias, form))
    return order.sum(torch.cat(parts), row_weights, x.dtype)


def eager(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    form: Form,
) -> Tensor:
    """The oracle: expert by expert, the tokens that chose it."""
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype), device=x.device)
    for expert in range(gate_up.shape[0]):
        tokens, places = torch.where(ids == expert)
        scale = weights[tokens, places, None]
        rows = (x[tokens] * scale).to(x.dtype) if form.weigh_input else x[tokens]
        out = _one(rows, expert, gate_up, down, gate_up_bias, down_bias, form)
        total = total.index_add(0, tokens, (out if form.weigh_input else out * scale).to(total.dtype))
    return total.to(x.dtype)


def _one(
    rows: Tensor,
    expert: int,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    form: Form,
) -> Tensor:
    def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        its: Any = weight[expert]
        return F.linear(rows, its.t() if form.transposed else its, None if bias is None else bias[expert])

    return product(form.gate(product(rows, gate_up, gate_up_bias)), down, down_bias)
