"""Recording GEMM shapes, and the files that store them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_rocm import ops
from hf_rocm.errors import HfRocmError, TableError
from hf_rocm.ops.aiter.tables.columns import LAYOUTS
from hf_rocm.tools.tuning import shapes
from hf_rocm.tools.tuning.shapes import Gemm, Recording
from tests.tools.tuning.conftest import write

FLOAT = "torch.float32"


def test_every_kind_of_linear_call_is_recorded():
    module, weight, bias = nn.Linear(8, 16), torch.randn(24, 8), torch.randn(24)
    with Recording() as seen, torch.no_grad():
        module(torch.randn(2, 3, 8))
        module(torch.randn(2, 3, 8))
        F.linear(torch.randn(5, 8), weight)
        F.linear(input=torch.randn(5, 8), weight=weight, bias=bias)
        ops.linear(torch.randn(7, 8), weight)
        F.linear(torch.randn(0, 8), weight)
        torch.randn(8, 8) @ torch.randn(8, 8)
    F.linear(torch.randn(11, 8), weight)
    assert seen.shapes() == [
        Gemm(5, 24, 8, FLOAT, False),
        Gemm(5, 24, 8, FLOAT, True),
        Gemm(6, 16, 8, FLOAT, True),
        Gemm(7, 24, 8, FLOAT, False),
    ]


def test_fused_layers_count_as_one():
    q, k, v = (nn.Linear(8, n, bias=False) for n in (16, 4, 4))
    with Recording() as seen, torch.no_grad():
        for m in (1, 6):
            x = torch.randn(m, 8)
            q(x), k(x), v(x)
    assert seen.shapes([(q, k, v)]) == [Gemm(1, 24, 8, FLOAT, False), Gemm(6, 24, 8, FLOAT, False)]
    with seen, torch.no_grad():
        # A separate call to k, as in cross-attention.
        k(torch.randn(3, 8))
    assert {shape.n for shape in seen.shapes([(q, k, v)])} == {16, 4}


def test_layers_that_prepare_would_not_fuse_are_not_fusable():
    plain = nn.Linear(8, 4)
    assert shapes.fusable((plain, nn.Linear(8, 16)))
    assert not shapes.fusable((plain,))
    assert not shapes.fusable((plain, None))
    assert not shapes.fusable((plain, nn.Linear(8, 4, bias=False)))
    assert not shapes.fusable((plain, nn.Linear(16, 4)))
    assert not shapes.fusable((plain, nn.Linear(8, 4).half()))
    assert not shapes.fusable((plain, type("Other", (nn.Linear,), {})(8, 4)))


def test_a_fingerprint_depends_on_the_model_and_not_on_its_construction():
    one, same = (nn.Sequential(nn.Linear(8, 4), nn.ReLU()) for _ in range(2))
    assert shapes.fingerprint(one) == shapes.fingerprint(same)
    assert shapes.fingerprint(one) != shapes.fingerprint(one.half())
    assert shapes.fingerprint(same) != shapes.fingerprint(nn.Sequential(nn.Linear(8, 5)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.since)
def test_a_list_of_shapes_is_read_as_written(layout, tmp_path):
    plain = [Gemm(1, 64, 32, "torch.bfloat16", False), Gemm(7, 64, 32, "torch.float16", True)]
    shuffled = [*plain, Gemm(7, 64, 64, "torch.bfloat16", False, shuffled=True)]
    text = shapes.write(shuffled, layout)
    assert text.splitlines()[0] == ",".join(layout.untuned)
    assert shapes.read(write(tmp_path / "s.csv", text)) == (shuffled if layout.shuffled else plain)


HEADER = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\n"
VALID = "1,64,32,False,torch.bfloat16,torch.bfloat16,False,False\n"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("M,N\n1,2\n", 1, "missing columns: K, bias"),
        (HEADER + VALID + "1,64\n", 3, "expected 8 fields, as in the header, got 2"),
        (HEADER + VALID.replace("64", "-64"), 2, "at most 10 digits, got '1', '-64', '32'"),
        (HEADER + VALID.replace("64", "9" * 12), 2, "at most 10 digits, got"),
        (HEADER + VALID.replace("bfloat16", "bf16"), 2, "dtype must be a name such as torch.bfloat16"),
        (HEADER + VALID.replace("False", "no", 1), 2, "bias and bpreshuffle True or False"),
        (HEADER + VALID + '"', 3, "not CSV"),
        (HEADER + VALID + "\0", 3, "a NUL byte"),
    ],
)
def test_a_damaged_list_is_refused_with_the_line(text, line, words, tmp_path):
    with pytest.raises(TableError) as refused:
        shapes.read(write(tmp_path / "s.csv", text))
    assert words in refused.value.facts[f"line {line}"]


def test_an_empty_list_is_refused(tmp_path):
    for text in ("", HEADER):
        with pytest.raises(TableError):
            shapes.read(write(tmp_path / "s.csv", text))


@given(st.binary(max_size=200), st.integers(0, 120), st.integers(0, 40))
def test_random_bytes_result_in_shapes_or_an_error(tmp_path_factory, noise, position, cut):
    whole = (HEADER + VALID).encode()
    path = tmp_path_factory.getbasetemp() / "noise.csv"
    path.write_bytes(whole[:position] + noise + whole[position + cut :])
    try:
        gemms = shapes.read(path)
    except HfRocmError:
        return
    assert gemms and all(shape.m > 0 for shape in gemms)
