"""experts_add: the weighted sum of every token's experts, and the residual sum of the layer, in one operation.

With few tokens, the residual sum is so small that a separate kernel takes longer to launch than to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, compiler

from hf_rocm import options
from hf_rocm.errors import OptionError
from hf_rocm.ops import moe, moe_torch
from hf_rocm.ops.custom_op import compiling
from hf_rocm.ops.probe_cases import Draw
from hf_rocm.ops.registry import Case, Implementation, Operation, chosen_elsewhere, kernel_serves, refuses_nothing
from hf_rocm.ops.specs.experts import ExpertsAddCall, ExpertsCall, ExpertsSpec, Form
from hf_rocm.ops.triton import detect
from hf_rocm.ops.triton import experts as triton
from hf_rocm.options import Switch


def experts_add(
    residual: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    weigh_input: bool = False,
    limit: float = 7.0,
    alpha: float = 1.702,
) -> Tensor:
    """residual + experts(x, …). Rounds where separate operations would round.

    residual: [T, H] in x's dtype. The other arguments are those of `hf_rocm.ops.experts`. Returns a new tensor, [T, H].
    Raises `OptionError` like `experts`, and if the residual differs from x in shape or dtype.
    """
    form = Form(activation, transposed, interleaved, weigh_input, limit, alpha)
    call = ExpertsAddCall(residual, x, gate_up, down, ids, weights, gate_up_bias, down_bias, form)
    moe.check(_experts(call))
    if not _alike(call):
        found = f"{residual.dtype} {list(residual.shape)} and {x.dtype} {list(x.shape)}"
        raise OptionError("experts_add requires a residual of x's shape and dtype", facts={"found": found})
    spec = specification(call)
    serve = _operation.traced(spec) if compiling() or compiler._is_compiling_flag else _operation.calls[spec]
    result: Tensor = serve(call)
    return result


def one_kernel(
    residual: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    **form: Any,
) -> bool:
    """Whether the experts' last kernel adds the residual. If not, call `experts` and add it.

    More implementations serve `experts`. The arguments are those of `experts_add`.
    """
    if options.current().aiter["experts"] is Switch.REQUIRED or chosen_elsewhere(["experts"]) is not None:
        return False
    call = ExpertsAddCall(residual, x, gate_up, down, ids, weights, gate_up_bias, down_bias, Form(**form))
    return _alike(call) and kernel_serves(_operation, specification(call))


def _alike(call: ExpertsAddCall) -> bool:
    return call.residual.shape == call.x.shape and call.residual.dtype == call.x.dtype


def _experts(call: ExpertsAddCall) -> ExpertsCall:
    return ExpertsCall(*call[1:])


def specification(call: ExpertsAddCall) -> tuple[object, ...]:
    """The fields of an `ExpertsSpec`, as a plain tuple with which the implementation is selected."""
    *fields, grad = moe.specification(_experts(call))
    return (*fields, grad or (torch.is_grad_enabled() and call.residual.requires_grad))


def _with_sum(experts: Callable[[ExpertsCall], Tensor]) -> Callable[[ExpertsAddCall], Tensor]:
    """Return a function that computes the experts, then the residual sum."""

    def experts_add(call: ExpertsAddCall) -> Tensor:
        return call.residual + experts(_experts(call))

    return experts_add


def _cases(spec: ExpertsSpec) -> Iterator[Case]:
    draw = Draw(spec.dtype, spec.device)
    for case in moe.cases(spec):
        x = case.tensors[0]
        assert x is not None
        yield Case((draw(*x.shape), *case.tensors), case.others)


_operation = Operation(
    "experts_add", ExpertsSpec, _cases, moe.kind, family="experts", terms=ExpertsAddCall, recorded=(1, 2, 4)
)
_operation.register(
    Implementation(
        "triton", triton.NAME, triton.refuses, triton.experts_add, detect.checked("experts_add", triton.NAME)
    )
)
_operation.register(
    Implementation("torch", "sorted tokens, loop, add", refuses_nothing, _with_sum(moe_torch.sorted_loop))
)
_operation.register(Implementation("eager", "loop, add", refuses_nothing, _with_sum(moe_torch.eager)))
