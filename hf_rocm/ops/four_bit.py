"""4-bit integers in groups with one scale: the rounding of a row, and the order in which eight numbers share a word.

The numbers -8 … 7 are stored as 0 … 15. A group whose largest magnitude is `a` has the scale a / 7.5, rounded to bf16,
so that the scales take 16 bits for 128 numbers.

A row is stored in blocks of eight runs. Word w of a block has number w of every run, the first run in its lowest bits:
a kernel reads the numbers of a run, and the values of x that they multiply, as one contiguous piece each.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT4 = torch.int32  # the dtype of the words
SCALE = torch.bfloat16
PER_WORD = 8
GROUPS = (32, 64, 128)

_LONGEST = 64  # numbers in a run
_SMALLEST_SCALE = torch.finfo(SCALE).tiny


def run_length(k: int, group: int) -> int:
    """The length of the runs in a row of K numbers: a power of two that divides K into whole blocks, and a group into
    runs.

    K must be a multiple of 8.
    """
    length = min(_LONGEST, group)
    while k % (PER_WORD * length):
        length //= 2
    return length


def kernel_groups(k: int, group: int) -> tuple[int, int]:
    """(how many numbers a kernel adds up before it multiplies by a scale, 1); the first is 0 if a row has a single
    scale.
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


def dequantize_groups(words: Tensor, scale: Tensor, dtype: torch.dtype, zeros: Tensor | None = None) -> Tensor:
    """Dequantise words [N, K / 8] with scales [N, K / group], rounding once to dtype. Returns [N, K].

    zeros: [N, K / group] uint8, the stored number that stands for 0; None: 8.
    """
    n, k = words.shape[0], words.shape[1] * PER_WORD
    group = k // scale.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    levels = unpacked(words, run_length(k, group)).to(wide).view(n, -1, group)
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
