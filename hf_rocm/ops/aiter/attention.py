"""Dense attention through aiter's `mha_fwd` and `flash_attn_func`, with grouped heads and bottom-right alignment.

Both can run the same kernels. `mha_fwd` is a torch operator, which serves single queries, sinks and windows;
`flash_attn_func` is a Python function, which adds the backward pass and the assembly kernels for gfx942 and gfx950.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rocm.ops.aiter import contract, detect
from hf_rocm.ops.aiter.contract import why_not
from hf_rocm.ops.aiter.layout import rows_first
from hf_rocm.ops.custom_op import opaque
from hf_rocm.ops.fakes import attended

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hf_rocm.device import Device
    from hf_rocm.ops.specs.attention import AttentionSpec, AttentionTerms, DecodeSpec, VarlenSpec

LARGEST_HEAD = 256
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


def mha_fwd_refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why `mha_fwd` can't serve this call, or None. It passes sinks to the kernel."""
    reason = _mha_fwd_refuses(spec, device)
    if reason is not None or not spec.sinks:
        return reason
    if spec.one_query and spec.heads > spec.kv_heads and spec.window is None:
        return "mha_fwd regroups single queries without regrouping the sinks"
    return why_not(bind_mha_fwd(sinks=True))


def mha_fwd_lse_refuses(spec: AttentionSpec, device: Device) -> str | None:
    """Why `mha_fwd_lse` can't serve this call, or None. It applies the sinks to the output of `mha_fwd`."""
    reason = _mha_fwd_refuses(spec, device)
    if reason is None and not spec.sinks:
        return "it serves only calls with sinks"
    return reason


def flash_attn_func_refuses(spec: AttentionSpec, device: Device) -> str | None:
    reason = detect.unavailable(device) or dense_limits(spec)
    if reason is not None:
        return reason
    if spec.softcap:
        return "flash_attn_func has no softcap"
    if spec.sinks:
        return "flash_attn_func may choose an assembly kernel, which would drop the sinks"
    if spec.window == 1:
        return "for a window of one key, flash_attn_func would choose an assembly kernel that has no windows"
    assembly = may_be_assembly(spec)
    if not spec.grad and (spec.one_query or not assembly):
        return (
            "without gradients, flash_attn_func is faster only with assembly kernels (bf16, dim 128 or 192, no window)"
        )
    if assembly and device.arch not in ("gfx942", "gfx950") and not detect.release().at_least("0.1.16"):
        return f"flash_attn_func of {detect.release().name} would choose gfx942's assembly kernel on {device.arch}"
    return why_not(_flash_attn_func())


def may_be_assembly(spec: AttentionSpec | VarlenSpec) -> bool:
    """Whether aiter's Python functions may choose a kernel that lacks windows, softcap and sinks."""
    dims = spec.head_dim in (128, 192) and spec.value_dim == 128
    return spec.dtype == torch.bfloat16 and dims and spec.window is None


def limits(spec: AttentionSpec | VarlenSpec | DecodeSpec) -> str | None:
    """Why none of aiter's attention kernels can serve a call, or None."""
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"aiter's attention takes fp16 and bf16, not {_SHORT.get(spec.dtype, spec.dtype)}"
    if spec.head_dim % 8 or spec.value_dim % 8:
        return f"head dims must be multiples of 8, got {spec.head_dim} and {spec.value_dim}"
    if max(spec.head_dim, spec.value_dim) > LARGEST_HEAD:
        return f"head dims must be at most {LARGEST_HEAD}, got {spec.head_dim} and {spec.value_dim}"
    return None


def dense_limits(spec: AttentionSpec) -> str | None:
    """Why none of aiter's kernels can serve a dense call, or None. Dense calls have more limits than packed ones."""
    if spec.weights:
        return "aiter's kernels don't return attention weights"
    if spec.mask is not None:
        return "aiter takes one [S_q, S_k] bias, not a mask for each batch row"
    if spec.more_queries and (spec.causal or spec.window is not None):
        return "with more queries than keys, some rows attend to no key, and aiter's results for them are undefined"
    return limits(spec)


def mha_fwd(query: Tensor, key: Tensor, value: Tensor, **terms: Unpack[AttentionTerms]) -> tuple[Tensor, None]:
    """See `hf_rocm.ops.attention`; mask and softcap are always None here."""
    left, right = window_sides(terms["window"], terms["causal"])
    output: Tensor = _traced_mha_fwd(query, key, value, terms["sinks"], terms["scale"], terms["causal"], left, right)
    return output, None


def mha_fwd_lse(query: Tensor, key: Tensor, value: Tensor, **terms: Unpack[AttentionTerms]) -> tuple[Tensor, None]:
    """Like `mha_fwd`, but apply the sinks to the output of the kernel, using the log-sum-exp."""
    left, right = window_sides(terms["window"], terms["causal"])
    output: Tensor = _traced_mha_fwd_lse(
        query, key, value, terms["sinks"], terms["scale"], terms["causal"], left, right
    )
    return output, None


def flash_attn_func(query: Tensor, key: Tensor, value: Tensor, **terms: Unpack[AttentionTerms]) -> tuple[Tensor, None]:
    """See `hf_rocm.ops.attention`; mask, softcap and sinks are always None here. Differentiable."""
    left, right = window_sides(terms["window"], terms["causal"])
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if grad:
        # the compiler traces into aiter's function, which applies an autograd.Function
        return _flash_attn_func_forward(query, key, value, terms["scale"], terms["causal"], left, right, True), None
    output: Tensor = _traced_flash_attn_func(query, key, value, terms["scale"], terms["causal"], left, right, False)
    return output, None


def _mha_fwd_refuses(spec: AttentionSpec, device: Device) -> str | None:
    reason = detect.unavailable(device) or dense_limits(spec)
    if reason is not None:
        return reason
    if spec.grad:
        return "mha_fwd has no gradient"
    if spec.softcap:
        return "mha_fwd has no softcap"
    reason = single_query_limits(spec) if spec.one_query else None
    return reason or why_not(bind_mha_fwd())


def single_query_limits(spec: AttentionSpec | DecodeSpec) -> str | None:
    if spec.heads > spec.kv_heads and spec.value_dim != spec.head_dim:
        return f"mha_fwd regroups single queries only for equal head dims, got {spec.head_dim} and {spec.value_dim}"
    return None


# The arguments with which mha_fwd is always called, and the neutral values of those that some releases also require.
_GIVEN = frozenset(
    (
        "q",
        "k",
        "v",
        "dropout_p",
        "softmax_scale",
        "is_causal",
        "window_size_left",
        "window_size_right",
        "return_softmax_lse",
        "return_dropout_randval",
    )
)
_GIVEN_WITH_SINKS = _GIVEN | {"sink_ptr"}
_GIVEN_WITH_LENGTHS = _GIVEN | {"cu_seqlens_kv"}
_NEUTRAL = {"sink_size": 0, "cu_seqlens_q": None, "cu_seqlens_kv": None, "out": None, "bias": None}
_FLASH_GIVEN = frozenset(("q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "return_lse"))


def bind_mha_fwd(*, sinks: bool = False, lengths: bool = False) -> contract.Call | str:
    """`mha_fwd` as the installed release declares it, or the reason why it can't be called.

    sinks, lengths: whether calls pass attention sinks or the numbers of keys; not both.
    """
    passed = _GIVEN_WITH_SINKS if sinks else _GIVEN_WITH_LENGTHS if lengths else _GIVEN
    return contract.operator("mha_fwd", passed, _NEUTRAL)


def _flash_attn_func() -> contract.Call | str:
    return contract.function("flash_attn_func", _FLASH_GIVEN)


def window_sides(window: int | None, causal: bool) -> tuple[int, int]:
    """(left, right): the numbers of visible keys on both sides of the query's own position. −1 means unlimited.

    A window of W keys, including the query's own, has W − 1 keys to the left and, if causal, 0 to the right. Without a
    window both are unlimited, even if causal: causality is a separate argument of the kernels.
    """
    return (-1 if window is None else window - 1), (0 if causal else -1) if window is not None else -1


def call_mha_fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    *,
    lse: bool = False,
    sinks: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (output [B, S_q, H, D_v], log-sum-exp [B, H, S_q]); the log-sum-exp is valid only if `lse`.

    lengths: [B + 1], the cumulative numbers of keys of the rows, starting at 0.
    """
    further: dict[str, Any] = {}
    if sinks is not None:
        further["sink_ptr"] = sinks.float().contiguous()
    if lengths is not None:
        further["cu_seqlens_kv"] = lengths
    kernel: Any = bind_mha_fwd(sinks=sinks is not None, lengths=lengths is not None)
    results = kernel(
        q=rows_first(query),
        k=rows_first(key),
        v=rows_first(value),
        dropout_p=0.0,
        softmax_scale=scale,
        is_causal=causal,
        window_size_left=left,
        window_size_right=right,
        return_softmax_lse=lse,
        return_dropout_randval=False,
        **further,
    )
    return results[0], results[1]


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Apply sinks to the output: a sink only adds to the softmax's sum, so the output is scaled by Σ / (Σ + e^sink)."""
    share = torch.sigmoid(lse - sinks.float().view(1, -1, 1))  # [B, H, S_q]
    return (output * share.transpose(1, 2).unsqueeze(-1)).to(output.dtype).contiguous()


def _mha_fwd_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    left: int,
    right: int,
) -> Tensor:
    if query.numel() == 0 or key.numel() == 0:
        return attended(query, key, value).zero_()
    return call_mha_fwd(query, key, value, scale, causal, left, right, sinks=sinks)[0].contiguous()


def _mha_fwd_lse_forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float, causal: bool, left: int, right: int
) -> Tensor:
    if query.numel() == 0 or key.numel() == 0:
        return attended(query, key, value).zero_()
    return with_sinks(*call_mha_fwd(query, key, value, scale, causal, left, right, lse=True), sinks)


def _flash_attn_func_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, left: int, right: int, grad: bool
) -> Tensor:
    if query.numel() == 0 or key.numel() == 0:
        # computed from the inputs, so that their gradients are zero and not None
        return attended(query, key, value).zero_() + (query.sum() + key.sum() + value.sum()) * 0
    kernel: Any = _flash_attn_func()
    result = kernel(
        q=rows_first(query),
        k=rows_first(key),
        v=rows_first(value),
        dropout_p=0.0,
        softmax_scale=scale,
        causal=causal,
        window_size=(left, right),
        # With gradients, aiter asserts that this is True.
        return_lse=grad,
    )
    output: Tensor = result[0] if isinstance(result, (tuple, list)) else result
    return output.contiguous()


_TENSORS = "(Tensor query, Tensor key, Tensor value, "
_NUMBERS = "float scale, bool causal, int left, int right"
_traced_mha_fwd = opaque(f"aiter_mha_fwd{_TENSORS}Tensor? sinks, {_NUMBERS}) -> Tensor", _mha_fwd_forward, attended)
_traced_mha_fwd_lse = opaque(
    f"aiter_mha_fwd_lse{_TENSORS}Tensor sinks, {_NUMBERS}) -> Tensor", _mha_fwd_lse_forward, attended
)
_traced_flash_attn_func = opaque(
    f"aiter_flash_attn_func{_TENSORS}{_NUMBERS}, bool grad) -> Tensor", _flash_attn_func_forward, attended
)
