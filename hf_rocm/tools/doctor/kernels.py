"""Tests of other packages' kernels that were reported as wrong or slow. They run in doctor's child process."""

from __future__ import annotations

import time
from typing import Any

# Weights per absmax in bitsandbytes.
BLOCK = 64
# Half of the widest gap between adjacent values of NF4 (-1 and -0.696), plus the rounding error of a 16-bit absmax.
WIDEST = 0.155
# An image of 460 × 726 pixels in Qwen3-VL.
PATCHES, CHANNELS, KERNEL, EMBEDDING = 1288, 3, (2, 16, 16), 1152


def four_bit_gemm(torch: Any, bitsandbytes: Any, device: str) -> str | None:
    """Test bitsandbytes' NF4 weights on a device. Returns a description of the numerical error, or None.

    The unpacked weights are compared with the original ones. GEMMs with 1 row and with 8 rows, which use different
    kernels, are compared with fp64 GEMMs of the unpacked weights. The allowed error is twice that of PyTorch's
    bf16 GEMM, plus a rounding step.
    """
    # `tolerance` imports torch. The child imports torch in an earlier stage, which reports a failure.
    from hf_rocm.tolerance import allowed_error

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 512, generator=generator).bfloat16().to(device)
    packed, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    unpacked = bitsandbytes.functional.dequantize_4bit(packed, state)
    blocks = weight.double().cpu().reshape(-1, BLOCK)
    deviation = (unpacked.double().cpu().reshape(-1, BLOCK) - blocks).abs() / blocks.abs().amax(-1, keepdim=True)
    if not bool((deviation <= WIDEST).all()):
        return f"unpacked weights are off by up to {deviation.max().item():.2g} times their block's maximum"
    for rows in (1, 8):
        x = torch.randn(rows, 512, generator=generator).bfloat16().to(device)
        exact = x.double().cpu() @ unpacked.double().cpu().t()
        plain = _relative(x @ unpacked.t(), exact)
        error = _relative(bitsandbytes.matmul_4bit(x, packed.t(), quant_state=state), exact)
        if not error <= allowed_error(plain, torch.bfloat16):
            return f"a GEMM of {rows} row{'s' * (rows > 1)} is off by {error:.2g} (PyTorch's: {plain:.2g})"
    return None


def patch_embedding(torch: Any, device: str) -> tuple[float, float]:
    """Return the seconds for a vision tower's patch embedding by Conv3d, and by the GEMM with the same result."""
    weight = torch.randn(EMBEDDING, CHANNELS, *KERNEL, dtype=torch.bfloat16, device=device)
    patches = torch.randn(PATCHES, CHANNELS, *KERNEL, dtype=torch.bfloat16, device=device)
    flat, columns = patches.flatten(1), weight.flatten(1).t()

    def seconds(call: Any) -> float:
        # The first call selects and compiles a kernel.
        call().float().sum().item()
        began = time.perf_counter()
        call().float().sum().item()
        return time.perf_counter() - began

    convolution = seconds(lambda: torch.nn.functional.conv3d(patches, weight, stride=KERNEL))
    return convolution, seconds(lambda: flat @ columns)


def _relative(actual: Any, exact: Any) -> float:
    actual = actual.double().cpu()
    return float((actual - exact).norm() / exact.norm())
