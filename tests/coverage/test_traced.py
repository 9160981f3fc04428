"""torch.jit.trace of a prepared model: tracing runs stock code, and the traced graph returns stock's results."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hf_rocm
from hf_rocm import ops
from tests.coverage import inputs
from tests.coverage.case import params
from tests.coverage.cases import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

TRACED = ("gpt2", "gpt_neox", "deepseek_v3", "mixtral", "granitemoe", "gpt_oss", "llama", "bert", "qwen3_moe")


class FirstOutput(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, return_dict=False, **self.more)[0]


def traced(model, case, ids):
    whole = FirstOutput(model)
    whole.more = {} if case.kind == "encoder" else {"use_cache": False}
    with torch.no_grad():
        return torch.jit.trace(whole, ids, check_trace=False)


@params([case for case in CASES if case.id in TRACED])
def test_the_traced_model_equals_stock(case):
    stock = case.build(torch.float32)
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    ids, other = inputs.tokens(2, 9), inputs.tokens(2, 9, seed=3)
    try:
        expected = traced(stock, case, ids)
    except (RuntimeError, IndexError) as error:
        pytest.skip(f"stock can't be traced: {str(error).splitlines()[0]}")
    with ops.recording() as routes:
        graph = traced(prepared, case, ids)
    assert routes == []
    assert torch.equal(graph(other), expected(other))
    with torch.no_grad(), ops.recording() as routes:
        prepared(ids)
    # Outside tracing, hf_rocm's operations run.
    assert routes
