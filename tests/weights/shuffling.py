"""Models with shuffled weights, shared by several test files.

The CPU simulates an AMD GPU, and aiter is a recorded release. Calls to aiter are checked against the recorded
declarations. Their results are computed by reference functions, which unshuffle a weight that is marked as shuffled.
"""

from __future__ import annotations

import copy

import torch

import hf_rocm
from hf_rocm import ops
from hf_rocm.loading.prepare import REPORT
from tests.aiter import recorded
from tests.tolerance import assert_as_good_as_eager
from tests.weights import models
from tests.weights.models import IDS, LAYERS

NEWEST = recorded.RELEASES[-1]
# q + k + v, o, gate + up and down of every layer, and lm_head.
GEMMS = 4 * LAYERS + 1
ROWS = IDS.numel()


def build(**changes):
    return models.build(intermediate_size=96, **changes).bfloat16()


def prepared(**arguments):
    return hf_rocm.prepare(build(), force=True, **{"preshuffle": "all", "budget": 1.0, **arguments})


def account(model):
    return model.__dict__[REPORT]["preshuffle"]


def assert_shuffled_gemms(model, *, shuffled, plain=0, ids=IDS):
    """Check the results against stock's with the current weights, and count GEMMs with shuffled and plain weights."""
    twin = build()
    twin.load_state_dict({name: tensor.clone() for name, tensor in copy.deepcopy(model).state_dict().items()})
    with torch.no_grad():
        eager = twin(ids, use_cache=False).logits
        expected = twin.double()(ids, use_cache=False).logits
        del recorded.kernels.CALLS[:]
        with ops.recording() as routes:
            actual = model(ids, use_cache=False).logits
    assert_as_good_as_eager(actual, eager, expected)
    marked = [
        getattr(call.arguments["B"], "is_shuffled", False) for call in recorded.kernels.CALLS if "gemm" in call[0]
    ]
    assert (sum(marked), len(marked) - sum(marked)) == (shuffled, plain)
    assert [route.tier for route in routes if "linear" in route.operation] == ["aiter"] * (shuffled + plain)


def forwards(model):
    """The names of the modules that have their own forward."""
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


def traces(model):
    return [name for module in model.modules() for name in module.__dict__ if "hf_rocm" in name or name == "forward"]
