"""The runs of a first-use check don't share tensors, because an implementation may write to its inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_rocm.ops.probe_cases import _converted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("convert", [Tensor.double, Tensor.clone])
def test_every_run_has_its_own_copy_of_the_inputs(convert, dtype):
    value = torch.arange(3, dtype=dtype)
    copy = _converted(value, convert)
    assert torch.equal(copy, value.double() if convert is Tensor.double and value.is_floating_point() else value)
    copy.zero_()
    assert value.tolist() == [0, 1, 2]
