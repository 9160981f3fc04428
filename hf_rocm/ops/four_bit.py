"""4-bit numbers in groups that share a scale: the rounding of a row, and the order of the eight numbers in a word.

The numbers -8 … 7 are stored as 0 … 15. A group whose largest magnitude is `a` has the scale a / 7.5, rounded to bf16,
so that a scale takes 16 bits.

A row is stored in blocks of eight runs. Word w of a block contains number w of every run, with the first run in its
lowest bits. So a kernel reads contiguous numbers of a run, and multiplies them by contiguous values of x.

With a code, 0 … 15 are indices into a table: nf4 (QLoRA, https://arxiv.org/abs/2305.14314) and fp4, as bitsandbytes
defines them, and e2m1 of MXFP4. The scales of such a weight may be quantised too: with another table (double
quantisation), or to powers of two (MXFP4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, compiler

from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.mxfp4 import NUMBERS, powers

# The dtype of the words.
INT4 = torch.int32
SCALE = torch.bfloat16
PER_WORD = 8
GROUPS = (32, 64, 128)

E2M1 = "e2m1"
# The numbers of every code, in fp32. nf4: quantiles of the normal distribution. fp4: floats with a sign bit, two
# exponent bits and one mantissa bit.
CODES: Mapping[str, tuple[float, ...]] = {
    E2M1: NUMBERS,
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "fp4": tuple(
        sign * number
        for sign in (1.0, -1.0)
        for number in (
            *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0),
            *(0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
        )
    ),
}
# In these tables, numbers 8 … 15 are the negatives of numbers 0 … 7.
SIGNED = ("e2m1", "fp4")
# The number of scales that are quantised together.
PER_FACTOR = 256

# The maximum length of a run.
_LONGEST = 64
_SMALLEST_SCALE = torch.finfo(SCALE).tiny


class Nested(NamedTuple):
    """How scales [N, G] uint8 are decoded: a · code[q] + b. Every 256 scales, counted along the rows, share (a, b).

    code: [256]; factors: [⌈N · G / 256⌉, 2], a and b; both fp32.
    """

    code: Tensor
    factors: Tensor

    def decoded(self, scale: Tensor) -> Tensor:
        """The scales [N, G] in fp32."""
        factors = self.factors.repeat_interleave(PER_FACTOR, 0)[: scale.numel()]
        numbers = self.code.index_select(0, scale.flatten().int())
        return (numbers * factors[:, 0] + factors[:, 1]).view(scale.shape)

    def of_rows(self, rows: slice, groups: int) -> Nested:
        """Select rows of scales [N, groups]. The first row must start a block of 256 scales."""
        if rows.start is None and rows.stop is None:
            return self
        stop = None if rows.stop is None else -(-rows.stop * groups // PER_FACTOR)
        return self._replace(factors=self.factors[(rows.start or 0) * groups // PER_FACTOR : stop])


def table(code: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers of a code, [16]. In eager mode all weights share one tensor, which must not be changed."""
    return _shared(_numbers, code, dtype, device)


def table_bytes(code: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The bytes of `table` as int64 [bytes, 2]: the first bytes of numbers 0 … 7, those of 8 … 15, the second ones, …

    It is shared like the table.
    """
    return _shared(_bytes, code, dtype, device)


def _shared(make: Callable[..., Tensor], code: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    if compiling() or compiler._is_compiling_flag:
        return make(code, dtype, device)
    return _kept(make, code, dtype, device)


@cache
def _kept(make: Callable[..., Tensor], code: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return make(code, dtype, device)


def _numbers(code: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(CODES[code], dtype=dtype, device=device)


def _bytes(code: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    numbers = torch.tensor(CODES[code], dtype=dtype)
    return numbers.view(torch.uint8).view(16, -1).T.contiguous().view(torch.int64).to(device)


def run_length(k: int, group: int) -> int:
    """The length of the runs in a row of K numbers: a power of two if the size of the groups is a power of two.

    A row consists of whole blocks, and a group of whole runs. A group has at least two runs if these are then at least
    32 long, so that several products are added up before they are multiplied by the scale. K must be a multiple of 8.
    """
    length = min(_LONGEST, group, max(32, group // 2))
    while k % (PER_WORD * length):
        length //= 2
    return length


def kernel_groups(k: int, group: int) -> tuple[int, int]:
    """Return how many products a kernel sums before it multiplies by a scale, and the step to the next scale.

    The step is 1, or 0 if a row has a single scale.
    """
    return (group, 1) if group != k else (min(max(GROUPS), k & -k), 0)


def quantize_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round a weight [N, K] to 4 bits. Returns the words [N, K / 8] int32 and the scales [N, K / group] bf16.

    K is a multiple of group. A NaN or an infinity makes its group NaN.
    """
    n, k = weight.shape
    groups = weight.float().view(n, k // group, group)
    scale = (groups.abs().amax(-1) / 7.5).clamp(min=_SMALLEST_SCALE)
    scale = torch.where(scale.isfinite(), scale, torch.nan).to(SCALE)
    levels = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).nan_to_num(0.0) + 8
    return packed(levels.to(torch.int32).view(n, k), run_length(k, group)), scale


def dequantize_groups(
    words: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    zeros: Tensor | None = None,
    code: str | None = None,
    nested: Nested | None = None,
) -> Tensor:
    """Dequantise words [N, K / 8] with scales [N, K / group], rounding once to dtype. Returns [N, K].

    zeros: [N, K / group] uint8, the stored numbers that represent 0; None: 8. code: the name of the table that the
    stored numbers index; None: they are integers. nested: how uint8 scales are decoded; None: as those of MXFP4.
    """
    n, k = words.shape[0], words.shape[1] * PER_WORD
    group = k // scale.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    if scale.dtype == torch.uint8:
        scale = powers(scale) if nested is None else nested.decoded(scale)
    stored = unpacked(words, run_length(k, group)).view(n, -1, group)
    if code is not None:
        levels = table(code, wide, words.device).index_select(0, stored.flatten()).view(stored.shape)
    else:
        levels = stored.to(wide)
        levels -= 8 if zeros is None else zeros.to(wide).unsqueeze(-1)
    return (levels * scale.to(wide).unsqueeze(-1)).view(n, k).to(dtype)


def packed(levels: Tensor, run: int) -> Tensor:
    """Pack numbers 0 … 15, [N, K] int32, into words [N, K / 8]."""
    runs = levels.view(levels.shape[0], -1, PER_WORD, run)
    words = runs[:, :, 0].clone()
    for index in range(1, PER_WORD):
        words |= runs[:, :, index] << (4 * index)
    return words.view(levels.shape[0], -1)


def unpacked(words: Tensor, run: int) -> Tensor:
    """The inverse of `packed`."""
    blocks = words.view(words.shape[0], -1, 1, run)
    shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=words.dtype, device=words.device)
    return ((blocks >> shifts.view(1, 1, -1, 1)) & 0xF).view(words.shape[0], -1)
