"""aiter's Triton kernel for attention, called as in the aiter tier, and executed as machine code.

The tier calls one Triton kernel of aiter: `flash_attn_func` on Radeon GPUs, in releases that list them. The release in
the test environment has the same function, but without sinks, and with tile sizes only for MI300X and MI350X.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from hf_rocm.ops.aiter.layout import rows_first
from hf_rocm.ops.aiter.triton import _TILE
from hf_rocm.ops.attention_eager import attention as eager_attention
from tests.amdgcn import suite
from tests.tolerance import assert_as_good_as_eager
from tests.triton.routed import random

pytestmark = pytest.mark.skipif(suite.gpu() is None, reason="aiter's kernels are only executed as machine code")

# The architectures in this release's table of tile sizes.
TILED = ("gfx942", "gfx950")


@pytest.fixture(scope="module")
def flash_attn_func(tmp_path_factory):
    from tests.aiter import standins

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Importing aiter emits warnings.
        warnings.simplefilter("ignore")
        for name, value in standins.environment(tmp_path_factory.mktemp("rocm-tools")).items():
            patch.setenv(name, value)
        standins.install()
        gpu = suite.gpu()
        properties = SimpleNamespace(multi_processor_count=gpu.units, gcnArchName=gpu.arch, warp_size=gpu.lanes)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        module = pytest.importorskip("aiter.ops.triton.mha", reason="not run: needs amd-aiter", exc_type=ImportError)
        yield module.flash_attn_func


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 1, 70, 64), (2, 4, 2, 63, 63, 32), (1, 2, 1, 40, 97, 128)], ids=str
)  # B, H, Hkv, S_q, S_k, D
def test_attention(flash_attn_func, shape, causal, dtype):
    b, h, kv_heads, s_q, s_k, d = shape
    attend(flash_attn_func, shape, causal, dtype)
    # Run the same compiled variant with one more sequence and more blocks of keys.
    if d < 128:
        attend(flash_attn_func, (b + 1, h, kv_heads, s_q, s_k + 66, d), causal, dtype)


def attend(flash_attn_func, shape, causal, dtype):
    b, h, kv_heads, s_q, s_k, d = shape
    query = random(b, h, s_q, d, dtype=dtype)
    key, value = (random(b, kv_heads, s_k, d, dtype=dtype, seed=seed) for seed in (1, 2))
    # Strides that differ from those of the keys.
    value = torch.nn.functional.pad(value, (0, 16), value=torch.nan)[..., :d]
    terms = {"scale": d**-0.5, "causal": causal, "mask": None, "window": None, "softcap": None, "sinks": None}
    extra = {} if suite.arch() in TILED else {"config": dict(_TILE)}
    output = flash_attn_func(
        q=rows_first(query),
        k=rows_first(key),
        v=rows_first(value),
        softmax_scale=terms["scale"],
        causal=causal,
        window_size=(-1, -1),
        **extra,
    )
    output = output[0] if isinstance(output, (tuple, list)) else output
    expected, _ = eager_attention(*(tensor.double() for tensor in (query, key, value)), **terms)
    assert_as_good_as_eager(output.contiguous(), eager_attention(query, key, value, **terms)[0], expected)


def test_other_gpus_have_no_tile_sizes_in_this_release(flash_attn_func):
    if suite.arch() in TILED:
        pytest.skip("this release has tile sizes for this GPU")
    x = random(1, 16, 2, 32, dtype=torch.bfloat16)
    with pytest.raises(KeyError, match=str(suite.arch())):
        flash_attn_func(q=x, k=x, v=x, softmax_scale=0.2, causal=False, window_size=(-1, -1))
