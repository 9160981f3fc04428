"""Products of few rows through our kernels, alone or with norm, gate and residual sum.

Which of two kernels runs, and with which tiles, comes from `tile`: measured on one NVIDIA GPU, a guess for AMD's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm import options
from hf_rocm.device import is_rocm
from hf_rocm.ops.opaque import opaque
from hf_rocm.ops.triton import detect, norm
from hf_rocm.ops.triton.launch import launch, warps

if TYPE_CHECKING:
    from hf_rocm.device import Device
    from hf_rocm.ops.fused_linear import FusedLinearSpec
    from hf_rocm.ops.linear import LinearSpec

NAME = "few_rows"

DTYPES = (torch.bfloat16, torch.float16)
FEWEST = 16  # columns and K: smaller products are nobody's bottleneck
ROWS = 16  # of x in a program with matrix instructions, the fewest that they take


class Tile(NamedTuple):
    """How a product is cut. matrix: with matrix instructions; n, k: the part of W that a program has at once, k in each
    of `splits`."""

    matrix: bool
    n: int
    k: int
    splits: int
    threads: int
    stages: int

    def constants(self) -> dict[str, int]:
        """The last of the kernel's arguments."""
        shared = {"BLOCK_N": self.n, "BLOCK_K": self.k}
        return {"SPLITS": self.splits, "BLOCK_M": ROWS, **shared} if self.matrix else shared


def refuses(spec: LinearSpec | FusedLinearSpec, device: Device) -> str | None:
    """Why the kernels can't serve this product, or are not known to gain, or None."""
    return detect.unavailable(device) or _limits(spec) or _gain(spec.rows)


def fused_refuses(spec: FusedLinearSpec, device: Device) -> str | None:
    """The same with what rides along."""
    reason = refuses(spec, device)
    if reason is not None:
        return reason
    if spec.activation is not None and spec.n % 2:
        return f"a gate needs an even N, got {spec.n}"
    if spec.norm_dtype is not None and not spec.one_plus and spec.norm_dtype != spec.dtype:
        return f"the norm rounds where one dtype does, and its weight is {spec.norm_dtype}, not {spec.dtype}"
    if spec.norm_dtype not in (None, *norm.DTYPES):
        return f"the norm's weight is {spec.norm_dtype}"
    if spec.norm_dtype is not None and spec.k > norm.WIDEST:
        return f"our norm kernel holds a row of at most {norm.WIDEST}, got {spec.k}"
    return None


def _limits(spec: LinearSpec | FusedLinearSpec) -> str | None:
    if spec.grad:
        return "our kernels for few rows have no gradient"
    if spec.dtype not in DTYPES:
        return f"our kernels for few rows are for bf16 and fp16, not for {spec.dtype}"
    if spec.weight_dtype != spec.dtype or spec.bias_dtype not in (None, spec.dtype):
        return f"our kernels need one dtype, got {spec.dtype}, {spec.weight_dtype} and a bias of {spec.bias_dtype}"
    if not spec.contiguous:
        return "our kernels read rows that lie one after the other, and the weight isn't contiguous"
    if spec.n < FEWEST or spec.k < FEWEST:
        return f"N and K must be at least {FEWEST}, got {spec.n} and {spec.k}"
    return None


def _gain(rows: int) -> str | None:
    """Why the vendor's library comes first, unless our tier was named."""
    if rows or options.current().tier("linear") == "triton":
        return None
    return "products of more than 16 rows are the vendor's library's"


NARROW = 4096  # columns up to which programs must be small, or there are too few of them


def tile(rows: int, n: int, gated: bool, *, rocm: bool = False) -> Tile:
    """For an x of so many rows, and n columns of the result.

    Measured on one NVIDIA H200 with the matrices of Llama-3.1-8B in bf16, in a recorded graph, where up to 16 rows it
    is as fast as the vendor's library or faster. On AMD GPUs nothing was measured: they get the same, with what they
    have less of (local memory, registers) spared; `HF_ROCM_TIER=linear=torch` gives them the vendor's library.
    """
    if rows > 1:
        if n <= NARROW and not gated:
            return Tile(True, 16, 128, 4, 128, 2 if rocm else 3)
        return Tile(True, 32 if rocm and gated else 64, 128, 1, 128, 2 if rocm else 4 + (not gated))
    if gated or n <= NARROW:
        return Tile(False, 2, 512, 1, 64, 2)
    return Tile(False, 4, 1024, 1, 128, 2)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `hf_rocm.ops.linear`."""
    result: Tensor = _traced(x, weight, bias, None, None, 0.0, False, None)
    return result


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    one_plus: bool,
    activation: str | None,
) -> Tensor:
    """See `hf_rocm.ops.fused_linear`. Everything is rounded where the separate layers round."""
    result: Tensor = _traced(x, weight, bias, norm_weight, residual, eps, one_plus, activation)
    return result


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    one_plus: bool,
    activation: str | None,
) -> Tensor:
    out = _shape(x, weight, bias, norm_weight, residual, eps, one_plus, activation)
    n, k = out.shape[-1], weight.shape[1]
    m = out.numel() // n
    if m == 0:
        return out
    if residual is not None:
        residual = residual.contiguous()
    from hf_rocm.ops.triton.kernels import linear as kernels

    if norm_weight is not None:  # in every program of the product it would take longer than before it
        x = norm.rms_norm(x, norm_weight, eps, one_plus)
    cut = tile(m, n, activation is not None, rocm=is_rocm())
    launch(
        kernels.few_rows if cut.matrix else kernels.matrix_vector,
        (-(-n // cut.n), -(-m // ROWS)),
        (x.contiguous(), weight, bias, residual, out, m, n, k),
        {"ACTIVATION": activation, "EVEN": k % (cut.splits * cut.k) == 0, **cut.constants()},
        num_warps=warps(cut.threads, x.device),
        num_stages=cut.stages,
    )
    return out


def _shape(x: Tensor, weight: Tensor, *further: Any) -> Tensor:
    activation = further[-1]
    n = weight.shape[0]
    return x.new_empty((*x.shape[:-1], n if activation is None else n // 2))


_traced = opaque(
    "triton_fused_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? residual, float eps, "
    "bool one_plus, str? activation) -> Tensor",
    _forward,
    _shape,
)
