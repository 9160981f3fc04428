"""The overhead of routing (selecting the implementation) in an eager call of an operation.

The chosen implementation is replaced by an empty function, so that only the routing is timed. The target is below 2 µs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_rocm import ops
from hf_rocm.ops.registry import Choice, Implementation, operations, refuses_nothing
from hf_rocm.tools.bench.ops import Line

CALLS, ROUNDS = 5000, 7


def routing() -> Iterator[Line]:
    """Yield a line for each of four operations, with the routing overhead in µs: the median of several rounds."""
    x, row, weight, heads = torch.ones(1, 8), torch.ones(8), torch.ones(8, 8), torch.ones(1, 2, 1, 8)
    calls: dict[str, Callable[[], Any]] = {
        "attention": lambda: ops.attention(heads, heads, heads, scale=0.3, causal=True),
        "linear": lambda: ops.linear(x, weight),
        "act_and_mul": lambda: ops.act_and_mul(x, activation="silu"),
        "rms_norm": lambda: ops.rms_norm(x, row, eps=1e-6),
    }
    for name, call in calls.items():
        operation = operations()[name]
        operation.forget()
        call()
        (key,) = operation.choices
        idle = Implementation("torch", "nothing", refuses_nothing, _nothing)
        operation.keep(Choice(operation.spec_type(*key), idle, ()))
        added = [_loop(call) - _loop(_nothing) for _ in range(ROUNDS)]
        operation.forget()
        yield Line("routing", name, "router", 1e6 * statistics.median(added), 0.0, None, "host")


def _loop(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS


def _nothing(*arguments: object, **keywords: object) -> None:
    return None
