"""The one table of NVIDIA's libraries and what takes their place on ROCm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
    """cuda: NVIDIA's, or one that only its GPUs have. rocm: its counterpart. headers: how C and C++ include it, as
    beginnings of the path. packages: the Python modules that bring it. hipify: PyTorch's extension builder translates
    the includes and calls by itself.
    """

    cuda: str
    rocm: str
    headers: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    hipify: bool = False


LIBRARIES = (
    Library("CUDA's runtime", "HIP", ("cuda.h", "cuda_runtime", "cuda_fp16.h", "cuda_bf16.h"), hipify=True),
    Library("cuBLASLt", "hipBLASLt", ("cublasLt.h",), hipify=True),
    Library("cuBLAS", "hipBLAS or rocBLAS", ("cublas.h", "cublas_v2.h", "cublas_api.h"), hipify=True),
    Library("cuSPARSE", "hipSPARSE or rocSPARSE", ("cusparse.h", "cusparse_v2.h"), hipify=True),
    Library("cuSPARSELt", "hipSPARSELt", ("cusparseLt.h",)),
    Library("cuSOLVER", "hipSOLVER or rocSOLVER", ("cusolver",), hipify=True),
    Library("cuFFT", "hipFFT or rocFFT", ("cufft.h", "cufftXt.h"), hipify=True),
    Library("cuRAND", "hipRAND or rocRAND", ("curand",), hipify=True),
    Library("NCCL", "RCCL, which has NCCL's interface", ("nccl.h",), hipify=True),
    Library("CUB", "hipCUB or rocPRIM", ("cub/",), hipify=True),
    Library("Thrust", "rocThrust, under the same names", ("thrust/",), hipify=True),
    Library("cuDNN", "MIOpen", ("cudnn.h", "cudnn_frontend", "cudnn_ops")),
    Library("CUTLASS", "Composable Kernel", ("cutlass/", "cute/"), ("cutlass",)),
    Library("TensorRT", "MIGraphX", ("NvInfer", "NvOnnxParser"), ("tensorrt", "torch_tensorrt", "tensorrt_llm")),
    Library("NVTX", "rocTX", ("nvToolsExt.h", "nvtx3/"), ("nvtx",)),
    Library("NVML", "AMD SMI (the amdsmi package), or torch.cuda.mem_get_info()", ("nvml.h",),
            ("pynvml", "py3nvml", "nvidia_smi")),
    Library("CUDA Python", "hip-python", (), ("cuda", "pycuda", "cuda_bindings")),
    Library("cooperative groups", "HIP's cooperative groups, which have no async copies",
            ("cooperative_groups/memcpy_async.h",)),
    Library("DALI", "rocAL", (), ("nvidia.dali",)),
    Library("RAPIDS", "hipDF, or the CPU libraries", (), ("cudf", "cuml", "cugraph")),
    Library("flash-attn's CUDA build", "aiter's flash_attn_func, scaled_dot_product_attention, or flash-attn built for "
            "ROCm", (), ("flash_attn", "flash_attn_2_cuda")),
    Library("FlashAttention-3 (Hopper)", "aiter's flash_attn_func, or scaled_dot_product_attention", (),
            ("flash_attn_interface", "flash_attn_3")),
    Library("Transformer Engine", "ROCm/TransformerEngine, built for ROCm", ("transformer_engine/",),
            ("transformer_engine",)),
    Library("DeepGEMM", "aiter's gemm_a8w8_blockscale", (), ("deep_gemm",)),
    Library("FlashInfer", "aiter's paged and batch-prefill attention", ("flashinfer/",), ("flashinfer",)),
)  # fmt: skip


def by_package(module: str) -> Library | None:
    """The library that a dotted module name belongs to."""
    for library in LIBRARIES:
        if any(module == package or module.startswith(f"{package}.") for package in library.packages):
            return library
    return None


def by_header(header: str) -> Library | None:
    """The library that an `#include` belongs to."""
    for library in LIBRARIES:
        if any(header.startswith(beginning) for beginning in library.headers):
            return library
    return None
