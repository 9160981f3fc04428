"""Operations of the aiter tier with the real package: the expected kernels and arguments, and correct results."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.ops.attention_eager import attention as eager_attention
from hf_rocm.ops.linear import eager_linear
from hf_rocm.ops.pointwise import eager_act_and_mul, eager_add_rms_norm, eager_rms_norm, eager_rope
from hf_rocm.ops.varlen import eager_varlen
from tests.tolerance import assert_as_good_as_eager

DTYPES = [torch.bfloat16, torch.float16]
SHAPES = {  # B, H, Hkv, S_q, S_k, D, D_v
    "square": (2, 4, 2, 7, 7, 16, 16),
    "one": (1, 1, 1, 1, 1, 8, 8),
    "decode": (2, 4, 2, 1, 63, 64, 64),
    "decode without groups": (2, 4, 4, 1, 63, 64, 40),
    "chunk": (2, 6, 2, 5, 63, 24, 24),
    "value dim": (2, 4, 2, 3, 6, 16, 24),
    "gemma": (1, 2, 1, 9, 9, 256, 256),
}

pytestmark = pytest.mark.usefixtures("kernels", "mi300x")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(shape, dtype):
    b, h, kv_heads, s_q, s_k, d, value_dim = shape
    query = random(b, s_q, h, d, dtype=dtype).transpose(1, 2)
    return (
        query,
        random(b, kv_heads, s_k, d, dtype=dtype, seed=1),
        random(b, kv_heads, s_k, value_dim, dtype=dtype, seed=2),
    )


def run(kernels, operation, *arguments, family=None, **keywords):
    """Run an op in the aiter tier. Returns (output, route name, calls that reached a kernel)."""
    del kernels.CALLS[:]
    with options.override(tiers={family or operation: "aiter"}, probe=False), ops.recording() as routes:
        output = getattr(ops, operation)(*arguments, **keywords)
    assert [(route.operation, route.tier) for route in routes] == [(operation, "aiter")]
    return output, routes[0].name, list(kernels.CALLS)


def check_attention(kernels, shape, dtype, **keywords):
    query, key, value = qkv(shape, dtype)
    keywords = {"scale": query.shape[3] ** -0.5, **keywords}
    (output, weights), name, calls = run(kernels, "attention", query, key, value, **keywords)
    assert weights is None and output.is_contiguous()
    complete = {"causal": False, "mask": None, "window": None, "softcap": None, "sinks": None, **keywords}
    doubled = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in complete.items()}
    expected, _ = eager_attention(query.double(), key.double(), value.double(), **doubled)
    eager, _ = eager_attention(query, key, value, **complete)
    assert_as_good_as_eager(output, eager, expected)
    return name, calls


@every_shape
@every_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_mha_fwd(kernels, shape, dtype, causal, window):
    name, calls = check_attention(kernels, shape, dtype, causal=causal, window=window)
    assert name == "mha_fwd" and [call.kernel for call in calls] == ["mha_fwd"]
    arguments = calls[0].arguments
    b, h, kv_heads, s_q, s_k, d, value_dim = shape
    assert arguments["q"][1] == (b, s_q, h, d)
    assert arguments["k"][1] == (b, s_k, kv_heads, d) and arguments["v"][1] == (b, s_k, kv_heads, value_dim)
    assert arguments["window_size_left"] == (-1 if window is None else window - 1)
    assert arguments["is_causal"] is causal and arguments["return_softmax_lse"] is False


@every_shape
@every_dtype
@pytest.mark.parametrize("window", [None, 4])
def test_sinks_are_applied_through_the_log_sum_exp_if_the_kernel_has_no_sinks(kernels, shape, dtype, window):
    sinks = torch.linspace(-2, 2, shape[1]).to(dtype)
    name, calls = check_attention(kernels, shape, dtype, causal=True, window=window, sinks=sinks)
    assert name == "mha_fwd, sinks by lse"
    assert [(call.kernel, call.arguments["return_softmax_lse"]) for call in calls] == [("mha_fwd", True)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("s_q", "s_k", "kernel"), [(7, 7, "mha_fwd"), (130, 130, "fmha_v3_fwd"), (129, 140, "fmha_v3_fwd")]
)
def test_flash_attn_func_calls_the_assembly_kernel_for_long_sequences(kernels, s_q, s_k, kernel, causal):
    name, calls = check_attention(kernels, (2, 4, 2, s_q, s_k, 128, 128), torch.bfloat16, causal=causal)
    assert name == "flash_attn_func" and [call.kernel for call in calls] == [kernel]


@every_dtype
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "shape", [SHAPES["square"], SHAPES["chunk"], SHAPES["decode"], (1, 2, 1, 20, 20, 128, 128)], ids=str
)
def test_gradients(kernels, shape, dtype, window):
    tensors = qkv(shape, dtype)
    keywords = {"scale": 0.25, "causal": True, "window": window}

    def gradients(function, dtype):
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        output, _ = function(*inputs)
        return torch.autograd.grad(output.square().sum(), inputs)

    del kernels.CALLS[:]
    actual = gradients(lambda *inputs: run(kernels, "attention", *inputs, **keywords)[0], dtype)
    assert {call.kernel for call in kernels.CALLS} <= {"mha_fwd", "fmha_v3_fwd", "mha_bwd", "fmha_v3_bwd"}
    assert len(kernels.CALLS) == 2
    eager = {**keywords, "mask": None, "softcap": None, "sinks": None}
    expected = gradients(lambda *inputs: eager_attention(*inputs, **eager), torch.float64)
    measure = gradients(lambda *inputs: eager_attention(*inputs, **eager), dtype)
    for entry in zip(actual, measure, expected, strict=True):
        assert_as_good_as_eager(*entry)


def test_tensors_with_strides_that_kernels_cannot_read_are_copied(kernels):
    """Sliced keys, and a query with a strided last dim: the stand-ins raise if the kernel would misread them."""
    query, key, value = qkv(SHAPES["chunk"], torch.bfloat16)
    # Misaligned by 2 bytes.
    odd = random(2, 2, 63, 25, dtype=torch.bfloat16)[..., 1:]
    # The last dim has stride S.
    column = query.transpose(2, 3).contiguous().transpose(2, 3)
    for q, k in ((query, odd), (column, key)):
        (output, _), _, _ = run(kernels, "attention", q, k, value, scale=0.2)
        expected, _ = ops.attention(q.float(), k.float(), value.float(), scale=0.2)
        torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)


def test_attention_without_keys_returns_zeros(kernels):
    query, key, value = (random(2, 2, length, 8, dtype=torch.bfloat16) for length in (3, 0, 0))
    (output, _), _, calls = run(kernels, "attention", query, key, value, scale=1.0)
    assert torch.equal(output, torch.zeros(2, 3, 2, 8, dtype=torch.bfloat16)) and not calls


@every_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 16), (7, 64), (2, 3, 16), (64,), (0, 8)], ids=str)
@pytest.mark.parametrize("n", [1, 63])
def test_linear(kernels, dtype, bias, shape, n):
    x, weight = random(*shape, dtype=dtype), random(n, shape[-1], dtype=dtype, seed=1)
    offset = random(n, dtype=dtype, seed=2) if bias else None
    output, name, _ = run(kernels, "linear", x, weight, offset)
    assert name == "gemm_a16w16"
    if x.numel() == 0:
        assert output.shape == (*shape[:-1], n)
        return
    expected = eager_linear(x.double(), weight.double(), None if offset is None else offset.double())
    assert_as_good_as_eager(output, eager_linear(x, weight, offset), expected)


def test_linear_copies_rows_that_are_not_contiguous(kernels, monkeypatch):
    import aiter.tuned_gemm

    requests = []
    config = aiter.tuned_gemm.get_GEMM_A16W16_config
    monkeypatch.setattr(
        aiter.tuned_gemm,
        "get_GEMM_A16W16_config",
        lambda **shape: requests.append(shape) or {"libtype": "skinny", "solidx": 2, "kernelName": ""},
    )
    x, weight = random(3, 32, dtype=torch.bfloat16)[:, ::2], random(8, 16, dtype=torch.bfloat16, seed=1)
    offset = random(8, dtype=torch.bfloat16, seed=2)
    output, _, calls = run(kernels, "linear", x, weight, offset)
    assert config is not None and requests[0]["M"] == 3 and requests[0]["bias"] is False
    assert [call.kernel for call in calls] == ["wv_splitk_small_fp16_bf16"]
    expected = eager_linear(x.double(), weight.double(), offset.double())
    assert_as_good_as_eager(output, eager_linear(x, weight, offset), expected)


@every_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (2, 5, 16), (0, 16)], ids=str)
def test_act_and_mul(kernels, dtype, activation, shape):
    x = random(*shape, dtype=dtype) * 3
    output, _, calls = run(kernels, "act_and_mul", x, activation=activation)
    assert output.shape == (*shape[:-1], shape[-1] // 2)
    assert [call.kernel for call in calls] == [f"{activation}_and_mul"] * (x.numel() > 0)
    if x.numel():
        assert_as_good_as_eager(output, eager_act_and_mul(x, activation), eager_act_and_mul(x.double(), activation))


@every_dtype
@pytest.mark.parametrize("shape", [(1, 8), (3, 64), (2, 5, 16), (2, 3, 4, 24), (0, 8)], ids=str)
def test_rms_norm(kernels, dtype, shape):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    if len(shape) == 4:
        # The layout of the inputs of query and key norms.
        x = x.transpose(1, 2)
    output, _, calls = run(kernels, "rms_norm", x, weight, eps=1e-6)
    assert [call.kernel for call in calls] == ["rmsnorm2d_fwd"] * (x.numel() > 0)
    if x.numel():
        expected = eager_rms_norm(x.double(), weight.double(), 1e-6, False)
        assert_as_good_as_eager(output, eager_rms_norm(x, weight, 1e-6, False), expected)


@every_dtype
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("shape", [*SHAPES.values(), (2, 4, 2, 5, 9, 64, 128)], ids=str)
def test_softcap(kernels, shape, dtype, window):
    name, calls = check_attention(kernels, shape, dtype, causal=True, window=window, softcap=2.0)
    assert name == "flash_attn_varlen_func" and [call.kernel for call in calls] == ["mha_varlen_fwd"]
    assert calls[0].arguments["logits_soft_cap"] == 2.0


QUERY_ENDS, KEY_ENDS = torch.tensor([0, 5, 6, 14], dtype=torch.int32), torch.tensor([0, 5, 13, 21], dtype=torch.int32)


@every_dtype
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("d", "kernel"), [(64, "mha_varlen_fwd"), (128, "fmha_v3_varlen_fwd")])
def test_varlen_attention(kernels, dtype, softcap, window, d, kernel):
    assembly = d == 128 and dtype == torch.bfloat16 and window is None
    if assembly and softcap:
        # This release refuses the call (see test_refusals.py).
        return
    packed = random(14, 4, d, dtype=dtype), random(21, 2, d, dtype=dtype, seed=1), random(21, 2, d, dtype=dtype, seed=2)
    settings = {
        "longest_query": 8,
        "longest_key": 8,
        "scale": 0.2,
        "causal": True,
        "window": window,
        "softcap": softcap,
    }
    output, _, calls = run(kernels, "varlen_attention", *packed, QUERY_ENDS, KEY_ENDS, family="attention", **settings)
    assert [call.kernel for call in calls] == [kernel if assembly else "mha_varlen_fwd"]
    expected = eager_varlen(*(tensor.double() for tensor in packed), QUERY_ENDS, KEY_ENDS, **settings)
    assert_as_good_as_eager(output, eager_varlen(*packed, QUERY_ENDS, KEY_ENDS, **settings), expected)


@every_dtype
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_decode_attention_never_reads_unwritten_keys(kernels, dtype, sinks, kv_heads):
    """A static cache of 9 slots with 1, 4 and 9 keys; the other slots contain huge values."""
    query = random(3, 1, 4, 16, dtype=dtype).transpose(1, 2)
    key, value = (random(3, kv_heads, 9, 16, dtype=dtype, seed=seed) for seed in (1, 2))
    for row, length in enumerate((1, 4, 9)):
        key[row, :, length:] = value[row, :, length:] = 1e4
    lengths = torch.tensor([1, 4, 9], dtype=torch.int32)
    settings = {"scale": 0.25, "sinks": torch.linspace(-1, 1, 4).to(dtype) if sinks else None}
    output, name, calls = run(kernels, "decode_attention", query, key, value, lengths, family="attention", **settings)
    assert name == "mha_fwd, lengths" and output.shape == (3, 1, 4, 16)
    (call,) = calls
    assert call.arguments["cu_seqlens_kv"][0] == torch.int32 and call.arguments["is_causal"] is False
    for row, length in enumerate((1, 4, 9)):
        own = query[row : row + 1], key[row : row + 1, :, :length], value[row : row + 1, :, :length]
        complete = {"causal": False, "mask": None, "window": None, "softcap": None, **settings}
        eager, _ = eager_attention(*own, **complete)
        doubled = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in complete.items()}
        expected, _ = eager_attention(*(tensor.double() for tensor in own), **doubled)
        assert_as_good_as_eager(output[row : row + 1], eager, expected)


@every_dtype
@pytest.mark.parametrize("shape", [(1, 8), (3, 64), (2, 5, 16), (0, 8)], ids=str)
def test_add_rms_norm(kernels, dtype, shape):
    x, residual, weight = (
        random(*size, dtype=dtype, seed=seed) for seed, size in enumerate([shape, shape, shape[-1:]])
    )
    outputs, _, calls = run(kernels, "add_rms_norm", x, residual, weight, eps=1e-6, family="rms_norm")
    assert [call.kernel for call in calls] == ["rmsnorm2d_fwd_with_add"] * (x.numel() > 0)
    if x.numel():
        measure = eager_add_rms_norm(x, residual, weight, 1e-6, False)
        expected = eager_add_rms_norm(x.double(), residual.double(), weight.double(), 1e-6, False)
        for entry in zip(outputs, measure, expected, strict=True):
            assert_as_good_as_eager(*entry)


@every_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 16])
def test_rope(kernels, dtype, interleaved, rotated):
    query, key = random(2, 5, 4, 16, dtype=dtype).transpose(1, 2), random(2, 2, 5, 16, dtype=dtype, seed=1)
    angles = torch.rand(1, 5, rotated // 2) * 3
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    outputs, _, calls = run(kernels, "rope", query, key, *tables, interleaved=interleaved)
    assert [call.kernel for call in calls] == ["rope_cached_2c_fwd_impl"]
    assert calls[0].arguments["input_x"][1] == (5, 2, 4, 16)
    expected = eager_rope(query.double(), key.double(), *(table.double() for table in tables), interleaved)
    for entry in zip(outputs, eager_rope(query, key, *tables, interleaved), expected, strict=True):
        assert_as_good_as_eager(*entry)


def test_the_shuffled_order_matches_aiter(kernels):
    from aiter.ops.shuffle import shuffle_weight

    weight = random(48, 64, dtype=torch.bfloat16)
    assert torch.equal(ops.shuffle(weight).data, shuffle_weight(weight))


def test_operations_compile_without_a_graph_break(kernels):
    def operations(query, key, x, weight, matrix):
        attended, _ = ops.attention(query, key, key, scale=0.3, causal=True)
        with_sinks, _ = ops.attention(query, key, key, scale=0.3, causal=True, sinks=query[0, :, 0, 0])
        long, _ = ops.attention(query.repeat(1, 1, 1, 8), key.repeat(1, 1, 1, 8), key.repeat(1, 1, 1, 8), scale=0.3)
        normed = ops.rms_norm(ops.act_and_mul(x, activation="silu"), weight, eps=1e-6)
        return attended, with_sinks, long, ops.linear(normed, matrix)

    torch._dynamo.reset()
    compiled = torch.compile(operations, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), options.override(tier="aiter", probe=False):
        # From the second length on, the dimension is dynamic.
        for length in (7, 9, 12):
            arguments = (
                random(2, 4, length, 16, dtype=torch.bfloat16),
                random(2, 2, length, 16, dtype=torch.bfloat16),
                random(3, 16, dtype=torch.bfloat16),
                random(8, dtype=torch.bfloat16),
                random(8, 8, dtype=torch.bfloat16),
            )
            for actual, expected in zip(compiled(*arguments), operations(*arguments), strict=True):
                torch.testing.assert_close(actual, expected)
