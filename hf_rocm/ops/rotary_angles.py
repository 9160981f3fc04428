"""rotary_angles: cos and sin of every token's position times every frequency, for rotary position embeddings.

transformers computes them with nine small kernels, usually once per forward of a model. In a recorded decode step, each
of these kernels takes longer to launch than to run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, compiler

from hf_rocm import options
from hf_rocm.errors import OptionError
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.probe_cases import LENGTH
from hf_rocm.ops.registry import Case, Implementation, Operation, kernel_serves, refuses_nothing, serving
from hf_rocm.ops.specs.pointwise import RotaryAnglesSpec
from hf_rocm.ops.triton import rotary_angles as triton
from hf_rocm.ops.triton.detect import checked as checked_triton
from hf_rocm.options import Switch

HALVES, PAIRS, ONCE = LAYOUTS = ("halves", "pairs", "once")


def rotary_angles(
    inv_freq: Tensor, position_ids: Tensor, *, dtype: torch.dtype, scaling: float = 1.0, layout: str = HALVES
) -> tuple[Tensor, Tensor]:
    """cos and sin of position · frequency, times `scaling`. The product is rounded to fp32, as in transformers.

    inv_freq: [R / 2], floating-point; position_ids: [B, S], integers. cos and sin are computed in fp32 and returned in
    dtype (for inv_freq in fp64: computed and returned in fp64). layout: `halves` returns every angle in both halves of
    the last dim, `pairs` twice in succession, and `once` once. Returns (cos, sin), new tensors [B, S, R], or
    [B, S, R / 2] with `once`. Su et al. 2021, eq. 34. Raises `OptionError` for any other layout.
    """
    if layout not in LAYOUTS:
        raise OptionError(f"rotary_angles does not support the layout {layout!r}", facts={"known": ", ".join(LAYOUTS)})
    spec = _specification(inv_freq, position_ids, dtype, layout)
    traced = compiling() or compiler._is_compiling_flag
    serve = _operation.traced(spec) if traced else serving(_operation, spec, stock)
    result: tuple[Tensor, Tensor] = serve(inv_freq, position_ids, scaling, layout, dtype)
    return result


def one_kernel(inv_freq: Tensor, position_ids: Tensor, *, dtype: torch.dtype, layout: str) -> bool:
    """Whether one kernel computes `rotary_angles`."""
    if options.current().aiter["rope"] is Switch.REQUIRED:
        return False
    return kernel_serves(_operation, _specification(inv_freq, position_ids, dtype, layout))


def _specification(inv_freq: Tensor, position_ids: Tensor, dtype: torch.dtype, layout: str) -> tuple[object, ...]:
    grad = torch.is_grad_enabled() and inv_freq.requires_grad
    freq_dtype, position_dtype, device = inv_freq.dtype, position_ids.dtype, inv_freq.device
    frequencies = inv_freq.shape[0]
    return (dtype, freq_dtype, position_dtype, device, frequencies, layout, grad)


def stock(
    inv_freq: Tensor, position_ids: Tensor, scaling: float, layout: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The formula in PyTorch's operations; in fp64 after the product if inv_freq is in fp64."""
    wide = torch.promote_types(inv_freq.dtype, torch.float32)
    angles = (position_ids[..., None].float() * inv_freq.float()).to(wide)
    if layout == HALVES:
        angles = torch.cat((angles, angles), dim=-1)
    elif layout == PAIRS:
        angles = angles.repeat_interleave(2, dim=-1)
    result = wide if wide == torch.float64 else dtype
    return (angles.cos() * scaling).to(result), (angles.sin() * scaling).to(result)


def _cases(spec: RotaryAnglesSpec) -> Iterator[Case]:
    """Yield calls with small and large positions. Fast approximations of cos and sin are wrong for angles above 10⁵."""
    exponents = torch.arange(spec.frequencies, device=spec.device) / spec.frequencies
    inv_freq = (10000.0**-exponents).to(spec.freq_dtype)
    for b, s, step in ((1, 1, 1000003), (2, LENGTH, 7), (2, LENGTH, 14143)):
        position_ids = 1 + torch.arange(b * s, dtype=spec.position_dtype, device=spec.device).view(b, s)
        yield Case((inv_freq, position_ids * step), (1.25, spec.layout, spec.dtype))


_NAME = "rotary_angles_kernel"
_operation = Operation("rotary_angles", RotaryAnglesSpec, _cases, family="rope")
_operation.register(
    Implementation("triton", _NAME, triton.refuses, triton.rotary_angles, checked_triton("rotary_angles", _NAME))
)
_operation.register(Implementation("torch", "cos, sin", refuses_nothing, stock))
_operation.register(Implementation("eager", "cos, sin", refuses_nothing, stock))
