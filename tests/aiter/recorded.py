"""Stand-ins for every release of aiter since 0.1.5. They check calls against the release's declarations, and compute
the results in PyTorch.

releases.json contains the names, the order and the defaults of the arguments, from aiter's public repository.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from hf_rocm.ops.aiter.detect import Argument, Function, Release
from hf_rocm.ops.shuffled import unshuffle
from tests.aiter import standins

# The stand-ins that compute the results.
kernels = standins.load_kernels()

DATA = json.loads((Path(__file__).parent / "releases.json").read_text(encoding="utf-8"))
RELEASES: list[str] = DATA["releases"]
READS_SHUFFLED = Version("0.1.7.post3")


def release(version: str) -> Release:
    """The release in the form that `detect` returns. Its calls are recorded in `kernels.CALLS`."""
    return Release(
        Version(version),
        lambda name: _recorded("operators", version, name),
        lambda name: _recorded("functions", version, name),
    )


def declared(kind: str, version: str, name: str) -> str | None:
    """The argument list of a name in a release, or None if the release does not have it."""
    index = RELEASES.index(version)
    for entry in DATA[kind].get(name, ()):
        for span in entry["releases"]:
            first, _, last = span.partition(" … ")
            if RELEASES.index(first) <= index <= RELEASES.index(last or first):
                return str(entry["arguments"])
    return None


def _recorded(kind: str, version: str, name: str) -> Function | None:
    arguments = declared(kind, version, name)
    if arguments is None:
        return None
    namespace: dict[str, Any] = {}
    exec(f"def declared({arguments}): pass", namespace)
    signature = inspect.signature(namespace["declared"])

    def call(*positional: Any, **keywords: Any) -> Any:
        assert not positional, "arguments must be passed by keyword, because their positions differ between releases"
        values = dict(signature.bind(**keywords).arguments)
        kernels.CALLS.append(kernels.Call(name, dict(values)))
        return COMPUTE[name](Version(version), values)

    parameters = signature.parameters.values()
    return Function(
        call, tuple(Argument(parameter.name, parameter.default is inspect.Parameter.empty) for parameter in parameters)
    )


def _mha_fwd(version: Version, a: dict[str, Any]) -> tuple[Tensor, ...]:
    kernels.check_attention(a["q"], a["k"], a["v"])
    sides = a["window_size_left"], a["window_size_right"]
    ends = a.get("cu_seqlens_kv")
    settings = (a["softmax_scale"], a["is_causal"] and a["q"].shape[1] > 1, *sides)
    output, lse = kernels.attend(a["q"], a["k"], a["v"], *settings, name="mha_fwd", ends=ends)
    if a.get("sink_ptr") is not None:
        sinks = a["sink_ptr"]
        kernels.need(
            sinks.dtype == torch.float32 and sinks.shape == (a["q"].shape[2],), "sinks must be fp32 with the shape [H]"
        )
        kernels.need(
            a["q"].shape[1] > 1 or a["q"].shape[2] == a["k"].shape[2] or sides[0] >= 0,
            "regrouped single queries can't have sinks",
        )
        share = torch.sigmoid(lse - sinks[None, :, None])
        output = (output.float() * share.transpose(1, 2)[..., None]).to(output.dtype)
    assert a.get("sink_size", 0) == 0
    return output, lse if a["return_softmax_lse"] else lse.new_empty(0), lse.new_empty(0), torch.zeros(2)


def _flash_attn_func(version: Version, a: dict[str, Any]) -> Any:
    kernels.check_attention(a["q"], a["k"], a["v"])
    needs_grad = torch.is_grad_enabled() and any(a[name].requires_grad for name in "qkv")
    assert a["return_lse"] is needs_grad
    left, right = a["window_size"]
    output, lse = kernels.attend(a["q"], a["k"], a["v"], a["softmax_scale"], a["causal"], left, right, name="flash")
    return (output, lse) if a["return_lse"] else output


def _triton_flash_attn_func(version: Version, a: dict[str, Any]) -> Tensor:
    left, right = a["window_size"]
    # The real kernel refuses other values.
    assert right == -1
    # The real kernel has no table of tile sizes for most Radeon GPUs, and the tiles of Q, K and V must fit in 64 KiB of
    # LDS.
    tile = a["config"]
    assert (tile["BLOCK_M"] + 2 * tile["BLOCK_N"] * tile["num_stages"]) * a["q"].shape[-1] * 2 <= 2**16
    settings = (a["softmax_scale"], a["causal"], left, 0 if a["causal"] else -1)
    output, lse = kernels.attend(a["q"], a["k"], a["v"], *settings, name="triton")
    if a.get("sink") is not None:
        share = torch.sigmoid(lse - a["sink"][None, :, None])
        output = (output.float() * share.transpose(1, 2)[..., None]).to(output.dtype)
    return output


def _flash_attn_varlen_func(version: Version, a: dict[str, Any]) -> Any:
    left, right = a["window_size"]
    return kernels.mha_varlen_fwd(
        *(a["q"], a["k"], a["v"], a["cu_seqlens_q"], a["cu_seqlens_k"], a["max_seqlen_q"], a["max_seqlen_k"], 0, 0.0),
        *(a["softmax_scale"], a["logits_soft_cap"], False, a["causal"], left, right, False, False),
    )[0]


def _gemm(version: Version, a: dict[str, Any]) -> Tensor:
    kernels.check_rows(a["A"], a["B"])
    weight = a["B"]
    if getattr(weight, "is_shuffled", None) is True and version >= READS_SHUFFLED:
        weight = unshuffle(weight)
    return torch.nn.functional.linear(a["A"], weight, a["bias"]).to(a["otype"])


def _gemm_8_bit(version: Version, a: dict[str, Any]) -> Tensor:
    assert a["dtype"] in (torch.float16, torch.bfloat16)
    output = torch.empty(len(a["XQ"]), len(a["WQ"]), dtype=a["dtype"])
    return kernels.gemm_a8w8(a["XQ"], a["WQ"], a["x_scale"], a["w_scale"], output, a["bias"], 0)


def _gemm_8_bit_shuffled(version: Version, a: dict[str, Any]) -> Tensor:
    # The kernel supports no bias in any release.
    assert a["bias"] is None
    output = torch.empty(len(a["XQ"]), len(a["WQ"]), dtype=a["dtype"])
    return kernels.gemm_a8w8_bpreshuffle(a["XQ"], a["WQ"], a["x_scale"], a["w_scale"], output)


def _and_mul(activation: str) -> Any:
    def compute(version: Version, a: dict[str, Any]) -> None:
        getattr(kernels, f"{activation}_and_mul")(a["out"], a["input"])

    return compute


def _norm(version: Version, a: dict[str, Any]) -> Tensor:
    return kernels.rmsnorm2d_fwd(a["input"], a["weight"], a["epsilon"])


def _gemma_norm(version: Version, a: dict[str, Any]) -> None:
    a["out"].copy_(_one_plus(a["input"], a))


def _add_norm(version: Version, a: dict[str, Any]) -> None:
    kernels.rmsnorm2d_fwd_with_add(a["out"], a["input"], a["residual_in"], a["residual_out"], a["weight"], a["epsilon"])
    if a.get("gemma_norm"):
        a["out"].copy_(_one_plus(a["residual_out"], a))


def _one_plus(x: Tensor, a: dict[str, Any]) -> Tensor:
    kernels.check_rows(x)
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + a["epsilon"]) * (1 + a["weight"].float())


def _rope(version: Version, a: dict[str, Any]) -> None:
    kernels.rope_cached_2c_fwd_impl(**a)


COMPUTE = {
    "mha_fwd": _mha_fwd,
    "flash_attn_func": _flash_attn_func,
    "flash_attn_varlen_func": _flash_attn_varlen_func,
    "ops.triton.attention.mha:flash_attn_func": _triton_flash_attn_func,
    "gemm_a16w16": _gemm,
    "gemm_a8w8": _gemm_8_bit,
    "gemm_a8w8_bpreshuffle": _gemm_8_bit_shuffled,
    "silu_and_mul": _and_mul("silu"),
    "gelu_and_mul": _and_mul("gelu"),
    "gelu_tanh_and_mul": _and_mul("gelu_tanh"),
    "rms_norm": _norm,
    "rmsnorm": _gemma_norm,
    "rmsnorm2d_fwd_with_add": _add_norm,
    "rope_cached_2c_fwd_impl": _rope,
}
