"""Kernels at the start and the end of a decode step on a GPU, compared with PyTorch, and their use by `generate`."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_rocm
from hf_rocm import ops, options
from hf_rocm.ops import probe_cases
from hf_rocm.ops.append_tokens import stock as appended_by_torch
from hf_rocm.ops.look_up_drafts import stock as looked_up_by_torch
from hf_rocm.ops.registry import operations
from hf_rocm.ops.specs.step import AppendTokensCall
from tests.generation.conftest import counted, generate, make, prompt
from tests.triton.routed import routed
from tests.triton.test_begin_step import check_start
from tests.triton.test_step import appended, check

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def unprobed():
    with options.override(probe=False):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 128256), (1, 6, 151936), (32, 1, 32000), (256, 1, 262144), (3, 1, 5003), (1, 1, 61)], ids=str
)
def test_finish_step(shape, dtype):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    logits[..., shape[-1] // 3] = logits[..., 2 * shape[-1] // 3] = 60.0
    for bad in (None, torch.inf, -torch.inf, torch.nan):
        if bad is not None:
            logits[-1, -1, 7] = bad
        check(logits)


@pytest.mark.parametrize("rows", [1, 5, 64, 256])
@pytest.mark.parametrize("ends", [(), (4,), (4, 61, 7)], ids=str)
def test_append_tokens(ends, rows):
    tokens = torch.tensor([61, 5, 4, 7, 8], device="cuda")[torch.arange(rows, device="cuda") % 5]
    unfinished = (torch.arange(rows, device="cuda") % 4 != 2).long()
    for length in (1, 1023, 4096):
        ids = torch.arange(rows * length, device="cuda").view(rows, length)
        for pad in (None, torch.tensor(4, device="cuda")):
            arguments = ids, tokens, unfinished, torch.tensor(ends, device="cuda") if ends else None, pad
            step_ids = torch.zeros((rows, 1), dtype=torch.int64, device="cuda")
            assert all(
                map(torch.equal, appended(*arguments, step_ids), appended_by_torch(AppendTokensCall(*arguments)))
            )
            assert torch.equal(step_ids[:, 0], appended(*arguments)[0][:, -1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("starts", [False, True])
def test_begin_step(starts, dtype):
    common = {"device": "cuda", "dtype": dtype, "starts": starts}
    check_start(sizes=(4096,), position=1024, **common)
    check_start(batch=64, sizes=(1280, 768), windows=(None, 512), bases=(0, 700), position=1200, sources=1, **common)
    check_start(tokens=11, sizes=(32768,), position=31000, sources=2, **common)


@pytest.mark.parametrize("length", [1, 40, 1025, 32768])
@pytest.mark.parametrize("tokens", [1, 6, 11])
def test_look_up_drafts(tokens, length):
    for period in (3, 37, 20000):
        for accepted in (0, tokens // 2, tokens):
            ids = (torch.arange(length, device="cuda") % period)[None]
            selected = (torch.arange(length, length + tokens, device="cuda") % period)[None]
            step_ids = torch.cat((ids[:, -1:], selected[:, :-1]), dim=1)
            step_ids[:, 1 + accepted :] = -1
            headers = torch.zeros((2, 2), dtype=torch.int64, device="cuda")
            routed("look_up_drafts", ids, step_ids, selected, headers[0], ngram=2)
            looked_up_by_torch(ids, step_ids, selected, headers[1], 2)
            assert headers[0].tolist() == headers[1].tolist()


@pytest.mark.parametrize("name", ["begin_step", "look_up_drafts", "finish_step", "append_tokens"])
def test_the_first_use_check_passes(name):
    operation = operations()[name]
    kernel = next(implementation for implementation in operation.implementations if implementation.tier == "triton")
    device = torch.device("cuda", 0)
    for rows in (1, 200):
        specs = {
            "begin_step": (torch.uint8, device, 1, rows, 1, None, None, False, 2, 1, 1, False, True, True, False),
            "look_up_drafts": (torch.int64, device, 1 + rows % 16, 2, True, True, True, False),
            "finish_step": (torch.bfloat16, torch.int64, device, rows, 128256, 5, False, rows == 1, True, False),
            "append_tokens": (torch.int64, device, rows, 2, True, True, True, True, True, False),
        }
        kind = tuple(operation.kind(operation.spec_type(*specs[name])))
        assert probe_cases.check(name, "triton", kernel.name, kind) is None


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 20}], ids=["greedy", "sampled"])
def test_generate_uses_the_kernels(sampling):
    stock = make("llama", hidden_size=256, intermediate_size=512, head_dim=64, vocab_size=503).to("cuda")
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True, graphs=True)
    inputs = {name: tensor.cuda() for name, tensor in prompt(rows=3).items()}
    settings = {"new": 40, "seed": 0, "pad_token_id": 0, **sampling}
    ends = generate(stock, inputs, **settings)[:, -12].tolist()
    expected = generate(stock, inputs, eos_token_id=ends, **settings)
    with ops.recording() as routes:
        for _ in range(2):
            assert torch.equal(generate(prepared, inputs, eos_token_id=ends, **settings), expected)
    served = {route.operation: route.tier for route in routes}
    assert served["begin_step"] == served["finish_step"] == served["append_tokens"] == "triton"
    assert counted(prepared)[1] > 20
