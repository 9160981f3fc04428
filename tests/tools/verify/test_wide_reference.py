"""The reference runs all layers in a wider dtype, one block at a time, and restores every block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_rocm.tools.verify.intercept import intercepted
from hf_rocm.tools.verify.model_under_test import Subject
from hf_rocm.tools.verify.wide_reference import wide_of
from tests.coverage.inputs import tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_one_block_at_a_time_is_widened_and_all_are_restored(dtype, build):
    model = build("llama", dtype)
    subject = Subject(model)
    before = {name: (id(parameter), parameter.dtype) for name, parameter in model.named_parameters()}
    wide_blocks = []

    def watch(module, args, kwargs, call):
        wide_blocks.append([next(block.parameters()).dtype == subject.wide for block in subject.blocks.values()])
        return call(*args, **kwargs)

    inner = {id(block.mlp): watch for block in subject.blocks.values()}
    with torch.no_grad(), subject.reference(), intercepted(inner):
        logits = model(input_ids=tokens(1, 5)).logits
    assert logits.dtype == subject.wide == wide_of(dtype)
    assert wide_blocks == [[True, False], [False, True]]
    assert {name: (id(parameter), parameter.dtype) for name, parameter in model.named_parameters()} == before
    assert torch.get_default_dtype() == torch.float32 and nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_the_reference_is_as_accurate_as_a_float64_model(build):
    """The results differ by a few fp32 rounding steps, because only the reference computes norms in float64 too."""
    model = build("llama")
    with torch.no_grad(), Subject(model).reference():
        actual = model(input_ids=tokens(1, 5)).logits
    with torch.no_grad():
        # The norms of this model still compute in fp32.
        narrow = model.double()(input_ids=tokens(1, 5)).logits
    step = torch.finfo(torch.float32).eps
    error = ((actual - narrow).norm() / narrow.norm()).item()
    assert 0 < error < 16 * step
