"""Checks of aiter's kernels on real hardware, with the installed aiter: `pytest -m rocm`."""

from __future__ import annotations

import pytest
import torch

from hf_rocm import ops, options
from hf_rocm.device import describe
from hf_rocm.ops import probe_cases, registry
from tests.aiter.test_refusals import ACTIVATION, ATTENTION, DECODING, LINEAR, NORM, ROPE, VARLEN

pytestmark = pytest.mark.rocm

KINDS = [
    ("attention", ATTENTION),
    ("attention", ATTENTION._replace(head_dim=128, value_dim=128)),
    ("attention", ATTENTION._replace(square=False, head_dim=128, value_dim=128)),
    ("attention", ATTENTION._replace(one_query=True, square=False, causal=False)),
    ("attention", ATTENTION._replace(window=4)),
    ("attention", ATTENTION._replace(sinks=True)),
    ("attention", ATTENTION._replace(sinks=True, one_query=True, square=False)),
    ("attention", ATTENTION._replace(softcap=True)),
    ("attention", ATTENTION._replace(grad=True)),
    ("varlen_attention", VARLEN),
    ("decode_attention", DECODING),
    ("decode_attention", DECODING._replace(sinks=True)),
    ("linear", LINEAR),
    ("linear", LINEAR._replace(bias_dtype=torch.bfloat16)),
    ("shuffled_linear", LINEAR),
    ("act_and_mul", ACTIVATION),
    ("act_and_mul", ACTIVATION._replace(activation="gelu_tanh")),
    ("rms_norm", NORM),
    ("rms_norm", NORM._replace(one_plus=True)),
    ("add_rms_norm", NORM),
    ("rope", ROPE),
    ("rope", ROPE._replace(interleaved=True)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("operation", "spec"), KINDS, ids=str)
def test_every_kernel_that_does_not_refuse_is_correct(operation, spec, dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    changes = {name: dtype for name in ("weight_dtype", "angle_dtype") if name in spec._fields}
    spec = spec._replace(dtype=dtype, device=device, **changes)
    known = registry.operations()[operation]
    candidates = [route for route in known.implementations if route.tier == "aiter"]
    reasons = {candidate.name: candidate.refuses(spec, describe(device)) for candidate in candidates}
    served = [name for name, reason in reasons.items() if reason is None]
    for name in served:
        assert probe_cases.check(operation, "aiter", name, tuple(spec)) is None
    if not served:
        pytest.skip(f"not run: {reasons}")


def test_the_router_uses_aiter():
    x, weight = (
        torch.randn(4, 64, device="cuda", dtype=torch.bfloat16),
        torch.ones(64, device="cuda", dtype=torch.bfloat16),
    )
    with torch.no_grad(), options.override(tier="aiter"), ops.recording() as routes:
        ops.rms_norm(x, weight, eps=1e-6)
    assert routes[0].tier == "aiter"
