"""The constants of the tolerance: changing them would weaken every numerical test and every check on a machine."""

from __future__ import annotations

import pytest
import torch

from hf_rocm.tolerance import allowed_error


@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10), (torch.float32, 2**-23)])
def test_it_is_twice_the_eager_error_plus_one_rounding_step_of_the_largest_value(dtype, eps):
    assert allowed_error(0.0, dtype) == eps
    assert allowed_error(0.25, dtype, largest=8.0) == 0.5 + 8 * eps
