"""Stacked experts that `quantize` rounds to MXFP4, and the reasons why other experts keep their dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm import ops
from hf_rocm.layers.experts import StackedExperts, applies_its_activation
from hf_rocm.layers.mlp import activation_of
from hf_rocm.ops.mxfp4 import BLOCK, BYTES, MXFP4, dequantize, pack, quantize
from hf_rocm.ops.pointwise import CLAMPED
from hf_rocm.ops.specs.experts import Form
from hf_rocm.overlay import bind
from hf_rocm.weights.eligible import accepted_forward
from hf_rocm.weights.encoding import CHUNK
from hf_rocm.weights.mxfp4_experts import DOWN, GATE_UP, Mxfp4Experts
from hf_rocm.weights.quantized import Replacement

_NAMES = (GATE_UP, DOWN)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# gpt-oss has the same class in all releases, but overlays declare it as a layer only from transformers 5 on
_GPT_OSS = ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")
_OF_GPT_OSS = StackedExperts(activation=CLAMPED, limit="limit", alpha="alpha", transposed=True, interleaved=True)


class QuantizedExperts(Mxfp4Experts, Replacement):
    """Replaces a module with the parameters `gate_up_proj` and `down_proj` [E, …], and optional biases.

    State dicts contain the weights in `dtype` and the original layout, on the CPU: the originals if they were kept,
    else the dequantised weights. Loaded weights are quantised again. Biases become parameters of this module.
    """

    def __init__(self, experts: Any, *, warns: bool) -> None:
        super().__init__()
        form = _form(experts)
        assert isinstance(form, Form)
        self.activation, self.limit, self.alpha = form.activation, form.limit, form.alpha
        self.form = form
        self.take_place_of(experts, experts.down_proj.dtype, warns=warns)
        for name in _NAMES:
            weight = experts._parameters[name]
            count, n, k = _sizes(weight, form)
            for part, size in (("blocks", (BYTES,)), ("scales", ())):
                empty = torch.empty((count, n, k // BLOCK, *size), dtype=MXFP4, device=weight.device)
                self.register_buffer(f"{name}_{part}", empty, persistent=False)
            self.register_parameter(f"{name}_bias", experts._parameters.get(f"{name}_bias"))
            self.write(name, weight.detach())

    @classmethod
    def refusal(cls, module: Any) -> str | None:
        """The reason why a module of stacked experts keeps its dtype, or None."""
        form = _form(module)
        if isinstance(form, str):
            return form
        if module._forward_hooks or module._forward_pre_hooks:
            return "the experts have a forward hook"
        if not accepted_forward(module):
            return "the forward of the experts was replaced"
        biases = [module._parameters.get(f"{name}_bias") for name in _NAMES]
        if any(bias is not None for bias in biases) and (not form.interleaved or None in biases):
            return "the experts have biases in a layout that the kernels don't read"
        weights = [module._parameters.get(name) for name in _NAMES]
        for name, weight in zip(_NAMES, weights, strict=True):
            if type(weight) is not nn.Parameter or weight.dim() != 3:
                return f"{name} is not a plain parameter with three dimensions"
            if weight.dtype not in _DTYPES or weight.is_meta:
                return f"{name} is {'on the meta device' if weight.is_meta else weight.dtype}"
        (count, gate_up_rows, hidden), (down_count, down_rows, intermediate) = (
            _sizes(weight, form) for weight in weights
        )
        if (count, gate_up_rows, hidden) != (down_count, 2 * intermediate, down_rows):
            return f"{GATE_UP} and {DOWN} have shapes that don't fit together"
        parallel = getattr(module, "_is_expert_parallel", False) or getattr(module, "_hf_tp_plan", None) is not None
        if parallel or count != getattr(module, "num_experts", count):
            return "the experts are distributed across several devices"
        if hidden % BLOCK or intermediate % BLOCK:
            return f"the sizes {hidden} × {intermediate} of the experts are not both multiples of {BLOCK}"
        return None

    def packed(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        buffers: Any = self._buffers
        return buffers[f"{name}_blocks"], buffers[f"{name}_scales"], self._parameters[f"{name}_bias"]

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The result with the original weights, before they are released."""
        (experts,) = self.replaced
        biases = [experts._parameters.get(f"{name}_bias") for name in _NAMES]
        return ops.experts(
            x,
            experts.gate_up_proj,
            experts.down_proj,
            ids,
            weights,
            gate_up_bias=biases[0],
            down_bias=biases[1],
            **self.form._asdict(),
        )

    def release(self, *, keep: bool) -> None:
        """Free the original weights, or keep them in host memory."""
        for name in _NAMES:
            parameter = self.replaced[0]._parameters[name]
            with torch.inference_mode(parameter.is_inference()):
                parameter.data = parameter.data.cpu().clone() if keep else parameter.data.new_empty(0)
                parameter.grad = None

    @torch.no_grad()
    def write(self, name: str, weight: Tensor) -> None:
        """Quantise a weight in the layout of the replaced module, in chunks."""
        blocks, scales, _ = self.packed(name)
        for expert, matrix in enumerate(weight):
            rows = self._interleaved(name, matrix.t() if self.form.transposed else matrix)
            step = max(1, CHUNK // rows.shape[1])
            for first in range(0, len(rows), step):
                chunk = slice(first, first + step)
                codes, scales[expert, chunk] = quantize(rows[chunk].to(blocks.device))
                blocks[expert, chunk] = pack(codes)

    @torch.no_grad()
    def read(self, name: str, device: torch.device | str | None = None) -> Tensor:
        """The dequantised weight in the layout and dtype of the replaced module, as a new tensor."""
        blocks, scales, _ = self.packed(name)
        shape = [blocks.shape[0], blocks.shape[1], blocks.shape[2] * BLOCK]
        if self.form.transposed:
            shape[1:] = shape[:0:-1]
        weight = torch.empty(shape, dtype=self.dtype, device=device or blocks.device)
        for expert, matrix in enumerate(weight):
            rows = self._deinterleaved(name, dequantize(blocks[expert], scales[expert], self.dtype))
            matrix.copy_(rows.t() if self.form.transposed else rows)
        return weight

    def _interleaved(self, name: str, rows: Tensor) -> Tensor:
        """The rows of one expert, with gate and up interleaved as the kernels read them."""
        return rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if self._is_split(name) else rows

    def _deinterleaved(self, name: str, rows: Tensor) -> Tensor:
        """The inverse of `_interleaved`."""
        return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if self._is_split(name) else rows

    def _is_split(self, name: str) -> bool:
        return name == GATE_UP and not self.form.interleaved

    @property
    def kept(self) -> bool:
        return bool(self.replaced[0].down_proj.numel())

    def original(self) -> nn.Module:
        (experts,) = self.replaced
        for name in _NAMES:
            parameter = experts._parameters[name]
            with torch.inference_mode(parameter.is_inference()):
                device = self.packed(name)[0].device
                parameter.data = parameter.data.to(device, self.dtype) if self.kept else self.read(name)
            experts._parameters[f"{name}_bias"] = self._parameters[f"{name}_bias"]
        module: nn.Module = experts
        return module

    def extra_repr(self) -> str:
        experts, hidden, blocks = self.packed(DOWN)[0].shape[:3]
        return f"{experts} experts, {hidden} × {BLOCK * blocks}, MXFP4"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.warn_if_rounded()
        for name in _NAMES:
            kept = self.replaced[0]._parameters[name].detach() if self.kept else None
            destination[prefix + name] = self.read(name, "cpu") if kept is None else kept.to(self.dtype)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        keys = {prefix + name: name for name in _NAMES}
        others = {key: value for key, value in state_dict.items() if key not in keys}
        rest = strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(others, prefix, local_metadata, *rest)
        for key, name in keys.items():
            value = state_dict.get(key)
            if value is None:
                missing_keys += [key] if strict else []
            elif _sizes(value, self.form) != (expected := self._sizes_of(name)):
                error_msgs.append(
                    f"size mismatch for {key}: {list(value.shape)} given, {list(expected)} (experts, N, K) expected"
                )
            else:
                self.write(name, value.to(self.dtype))
                if self.kept:
                    self.replaced[0]._parameters[name].data.copy_(value)

    def _sizes_of(self, name: str) -> tuple[int, ...]:
        count, n, blocks = self.packed(name)[1].shape
        return count, n, blocks * BLOCK


def _sizes(weight: Any, form: Form) -> tuple[int, ...]:
    """E, N and K of a weight [E, N, K], or [E, K, N] if it is transposed."""
    return (weight.shape[0], *weight.shape[:0:-1]) if form.transposed else tuple(weight.shape)


def _form(module: Any) -> Form | str:
    """The form of a module's experts, or the reason why it is unknown."""
    binding = bind.binding_of(module)
    layer = None if binding is None else binding.layer
    if (type(module).__module__, type(module).__qualname__) == _GPT_OSS:
        layer = _OF_GPT_OSS
    if not isinstance(layer, StackedExperts):
        return "no overlay describes the layout of these experts, or the model is not prepared"
    activation = layer.activation
    if activation is None and applies_its_activation(module):
        activation = activation_of(module._modules.get("act_fn"))
    if activation is None:
        return "the experts' activation is not supported by ops.mxfp4_experts, or it was changed"
    limit, alpha = (float(getattr(module, name)) if name else 0.0 for name in (layer.limit, layer.alpha))
    return Form(activation, layer.transposed, layer.interleaved, False, limit, alpha)
