"""Settings of torch and the ROCm runtime that make torch slower, or that affect only NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from hf_rocm.tools.doctor.facts import Facts
from hf_rocm.tools.doctor.report import Finding, ok, warning

NVIDIA_ONLY = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
BLAS = (
    "TORCH_BLAS_PREFER_HIPBLASLT",
    "ROCBLAS_USE_HIPBLASLT",
    "DISABLE_ADDMM_HIP_LT",
    "HIPBLASLT_ALLOW_TF32",
    "TORCH_ROCM_FA_PREFER_CK",
)
SLOW = {
    "AMD_SERIALIZE_KERNEL": "kernels run one after another",
    "AMD_SERIALIZE_COPY": "copies run one after another",
    "HIP_LAUNCH_BLOCKING": "every kernel launch is synchronous",
    "AMD_LOG_LEVEL": "the runtime logs every call",
    "HSA_ENABLE_SDMA": "copies do not use the DMA engines",
}


def torch_settings(facts: Facts) -> Iterator[Finding]:
    if not facts.torch.hip or not facts.amd:
        return
    yield from _flags(facts)
    yield _blas(facts)
    yield from _tunable(facts)
    yield from _slow(facts)


def _flags(facts: Facts) -> Iterator[Finding]:
    flags = facts.torch_result.facts.get("flags", {})
    if not flags:
        return
    failing = {name: value for name, value in flags.items() if isinstance(value, str) and "Error" in value}
    if failing:
        yield warning(
            "flags",
            f"this build cannot set {', '.join(f'torch.{name}' for name in failing)}",
            means="code that sets them for NVIDIA fails here",
            fix="set them through hf_rocm.setup_environment(tf32=…), which skips flags that a build lacks",
        )
        return
    words = ", ".join(f"{name.removeprefix('backends.')} {value}" for name, value in flags.items())
    yield ok("flags", words)
    ignored = [f"{name}={facts.set(name)}" for name in NVIDIA_ONLY if facts.set(name)]
    if ignored:
        yield ok("flags", f"{', '.join(ignored)}: without effect on AMD's libraries")


def _blas(facts: Facts) -> Finding:
    switches = [f"{name}={facts.set(name)}" for name in BLAS if facts.set(name)]
    if facts.set("DISABLE_ADDMM_HIP_LT") == "1" or facts.set("TORCH_BLAS_PREFER_HIPBLASLT") == "0":
        return warning(
            "blas",
            f"hipBLASLt is disabled ({', '.join(switches)})",
            means="linear layers with a bias, and bf16 GEMMs on Instinct, use slower kernels",
            fix="unset DISABLE_ADDMM_HIP_LT TORCH_BLAS_PREFER_HIPBLASLT, unless you measured that it helps",
        )
    return ok("blas", "; ".join(["hipBLASLt, where torch selects it", *switches]))


def _tunable(facts: Facts) -> Iterator[Finding]:
    if facts.set("PYTORCH_TUNABLEOP_ENABLED") != "1":
        return
    file = facts.set("PYTORCH_TUNABLEOP_FILENAME") or "tunableop_results.csv in the working directory"
    if facts.set("PYTORCH_TUNABLEOP_TUNING") == "0":
        yield ok("tunableop", f"TunableOp uses its existing results: {file}")
        return
    yield warning(
        "tunableop",
        "TunableOp is on, and tunes every new shape",
        means="the first call of a shape takes seconds to minutes; aiter's kernels are not tried",
        fix="run hf-rocm tune MODEL once, or set PYTORCH_TUNABLEOP_TUNING=0 after tuning",
    )


def _slow(facts: Facts) -> Iterator[Finding]:
    slow = {
        name: reason
        for name, reason in SLOW.items()
        if (facts.set(name) == "0" if name == "HSA_ENABLE_SDMA" else facts.set(name) not in ("", "0"))
    }
    if slow:
        yield warning(
            "slow-switches",
            ", ".join(f"{name}={facts.set(name)}" for name in slow),
            means="; ".join(slow.values()) + ": for debugging, or a workaround that costs speed",
            fix=f"unset {' '.join(slow)}",
        )
