"""Routed experts in PyTorch: grouped GEMMs, batched GEMMs for few tokens, and two loops.

`gathered` and `grouped` don't synchronise with the host, so they can be recorded in a graph. There are two exceptions:
`grouped` synchronises if PyTorch has no kernel for the dtype on this GPU (recent GPUs have one for bf16), and if the
dequantised weights of all experts exceed the limit on temporary memory. Both loops synchronise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from hf_rocm.ops.pointwise import act_and_mul, one_kernel, torch_act_and_mul
from hf_rocm.ops.specs.experts import ExpertsCall, ExpertsSpec, Form

if TYPE_CHECKING:
    from hf_rocm.device import Device

# On a GPU, copying the weights of up to this many token-expert pairs is faster than a grouped GEMM.
FEW = 32

_grouped_mm: Callable[..., Tensor] | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def grouped_refuses(spec: ExpertsSpec, device: Device) -> str | None:
    if _grouped_mm is None:
        return f"PyTorch {torch.__version__} has no grouped_mm"
    if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16) or spec.weight_dtype != spec.dtype:
        dtypes = f"{spec.dtype} and {spec.weight_dtype}"
        return f"grouped_mm needs x and the weights in one dtype (fp32, bf16 or fp16), got {dtypes}"
    if spec.traced and spec.dtype != torch.bfloat16:
        return f"the compiler lowers grouped_mm only for bf16, not for {spec.dtype}"
    for name, size in (("hidden", spec.hidden), ("intermediate", spec.intermediate)):
        if size * spec.dtype.itemsize % 16:
            return f"the size of grouped_mm's rows must be a multiple of 16 bytes, got {name} size {size}"
    if not spec.contiguous:
        return "the weights aren't contiguous"
    return None


def grouped(call: ExpertsCall) -> Tensor:
    """Sort the (token, expert) pairs by expert, and run them through two grouped GEMMs. Differentiable."""
    order = _Order(call)
    if not call.ids.numel():
        return call.x * 1
    form = call.form
    ends = torch.searchsorted(order.sorted_ids, order.all_ids, right=True, out_int32=True)

    def project(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = _grouped_gemm(rows, weight, ends, transposed=form.transposed)
        return out if bias is None else out + _chosen(bias, order.sorted_ids)

    rows, row_weights = order.rows(call)
    gated = _gate_at_once(project(rows, call.gate_up, call.gate_up_bias), form)
    return order.sum(project(gated, call.down, call.down_bias), row_weights, call.x.dtype)


def _grouped_gemm(rows: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
    """Multiply rows [S, K], sorted by expert, by the weights of their experts. Returns [S, N].

    ends: [E], the end of each expert's rows. Weights that are dequantised when they are indexed have `at_once`, the
    number of experts whose dequantised weights are within the limit on temporary memory. If there are more experts, the
    host reads `ends`, so it waits for the device.
    """
    assert _grouped_mm is not None
    at_once = getattr(weight, "at_once", None)
    if at_once is None or at_once >= len(ends):
        whole = weight if at_once is None else weight[:]
        return _grouped_mm(rows, whole if transposed else whole.transpose(1, 2), offs=ends)
    limits = [0, *ends.tolist()]
    results = []
    for first in range(0, len(ends), at_once):
        last = min(first + at_once, len(ends))
        start, end = limits[first], limits[last]
        if start < end:
            part = weight[first:last]
            part = part if transposed else part.transpose(1, 2)
            results.append(_grouped_mm(rows[start:end], part, offs=ends[first:last] - start))
    return torch.cat(results)


def _chosen(bias: Tensor, ids: Tensor) -> Tensor:
    """The rows `ids` [S] of the bias [E, N]: [S, N].

    The gradient of an expert's bias is a sum over rows, which PyTorch would round to the dtype after every row. So it
    is computed in a wider dtype.
    """
    if not (bias.requires_grad and torch.is_grad_enabled()):
        return bias[ids]
    wider = torch.float32 if bias.dtype.itemsize < 4 else torch.float64
    return bias.to(wider)[ids].to(bias.dtype)


class _Order:
    """Sorts the pairs (token, expert) by expert, and sums their outputs for every token."""

    def __init__(self, call: ExpertsCall) -> None:
        ids, experts = call.ids, call.gate_up.shape[0]
        self.tokens, self.top_k = ids.shape
        self.sorted_ids, self.indices = ids.flatten().sort(stable=True)
        self.all_ids = torch.arange(experts, device=ids.device, dtype=ids.dtype)

    def rows(self, call: ExpertsCall) -> tuple[Tensor, Tensor | None]:
        """x [S, H] in the order of the experts, and the weights [S] that must still be applied, or None."""
        rows, row_weights = call.x[self.indices // self.top_k], call.weights.flatten()[self.indices]
        if call.form.weigh_input:
            return (rows * row_weights[:, None]).to(call.x.dtype), None
        return rows, row_weights

    def sum(self, out: Tensor, row_weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Multiply the outputs [S, H] by the weights, restore the order of the tokens, and sum: [T, H]."""
        if row_weights is not None:
            out = out * row_weights[:, None]
        back = torch.empty_like(self.indices)
        back[self.indices] = torch.arange(len(self.indices), device=back.device)
        return out[back].view(self.tokens, self.top_k, -1).sum(1).to(dtype)


def gathered_refuses(spec: ExpertsSpec, device: Device) -> str | None:
    if device.kind == "cpu":
        return "on a CPU, copying the chosen experts' weights is slower than the loop"
    if not 0 < spec.pairs <= FEW:
        return f"there are more than {FEW} token-expert pairs: copying their experts' weights is too slow"
    if spec.grad:
        return "gradients would require the copies of the weights to be kept"
    if spec.weight_dtype != spec.dtype:
        return f"x and the gathered weights need one dtype, got {spec.dtype} and {spec.weight_dtype}"
    return None


def gathered(call: ExpertsCall) -> Tensor:
    """Copy the expert's weights for every token-expert pair, and run batched GEMMs on the copies. For few tokens."""
    x, ids, form = call.x, call.ids, call.form
    (tokens, top_k), chosen = ids.shape, ids.flatten()
    rows = x[:, None].expand(tokens, top_k, x.shape[1]).reshape(tokens * top_k, 1, x.shape[1])
    scales = call.weights.reshape(-1, 1)
    if form.weigh_input:
        rows = (rows * scales[..., None]).to(x.dtype)

    def project(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        copied = weight[chosen]
        out = torch.bmm(rows, copied if form.transposed else copied.transpose(1, 2))
        return out if bias is None else out + bias[chosen][:, None]

    gated = _gate_at_once(project(rows, call.gate_up, call.gate_up_bias), form)
    out = project(gated, call.down, call.down_bias).squeeze(1)
    if not form.weigh_input:
        out = out * scales
    return out.view(tokens, top_k, -1).sum(1).to(x.dtype)


def sorted_loop(call: ExpertsCall) -> Tensor:
    """Sort the pairs as `grouped` does, and run two GEMMs for each chosen expert. Synchronises with the host."""
    order = _Order(call)
    if not call.ids.numel():
        return call.x * 1
    rows, row_weights = order.rows(call)
    chosen, counts = torch.unique_consecutive(order.sorted_ids, return_counts=True)
    read: list[list[int]] = torch.stack((chosen.to(counts.dtype), counts)).tolist()
    parts = [_run_expert(call, expert, part) for expert, part in zip(read[0], rows.split(read[1]), strict=True)]
    return order.sum(torch.cat(parts), row_weights, call.x.dtype)


def eager(call: ExpertsCall) -> Tensor:
    """The oracle: run every expert on the tokens that are routed to it."""
    x, weights = call.x, call.weights
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype), device=x.device)
    for expert in range(call.gate_up.shape[0]):
        tokens, slots = torch.where(call.ids == expert)
        scale = weights[tokens, slots, None]
        rows = (x[tokens] * scale).to(x.dtype) if call.form.weigh_input else x[tokens]
        out = _run_expert(call, expert, rows)
        total = total.index_add(0, tokens, (out if call.form.weigh_input else out * scale).to(total.dtype))
    return total.to(x.dtype)


def _run_expert(call: ExpertsCall, expert: int, rows: Tensor) -> Tensor:
    """Run one expert's gated MLP on its rows."""

    def project(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        matrix = weight[expert]
        return F.linear(rows, matrix.t() if call.form.transposed else matrix, None if bias is None else bias[expert])

    return project(_gate(project(rows, call.gate_up, call.gate_up_bias), call.form), call.down, call.down_bias)


def _gate(h: Tensor, form: Form) -> Tensor:
    """Apply the gate: [..., 2I] to [..., I]."""
    return torch_act_and_mul(h, form.activation, form.interleaved, form.limit, form.alpha)


def _gate_at_once(h: Tensor, form: Form) -> Tensor:
    """Like `_gate`, in one kernel if there is one."""
    if is_compiling() or not one_kernel(h, activation=form.activation, interleaved=form.interleaved):
        return _gate(h, form)
    return act_and_mul(h, activation=form.activation, interleaved=form.interleaved, limit=form.limit, alpha=form.alpha)
