"""The numerical tolerance of checks, derived from the error of the eager run in the same dtype."""

from __future__ import annotations

import torch


def allowed_error(eager_error: float, dtype: torch.dtype, largest: float = 1.0) -> float:
    """Return twice the eager run's error plus one rounding step, since a result is rounded at least once.

    eager_error: the error against a reference of higher precision. largest: the largest expected magnitude, by which
    the rounding step is scaled; 1 for relative errors.
    """
    return 2 * eager_error + torch.finfo(dtype).eps * largest
