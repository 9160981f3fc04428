"""NVIDIA's libraries and tools with their counterparts on ROCm, in tables for the rules and the docs."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
    """A library and its counterpart.

    cuda: the name of a library from NVIDIA, or of another library that supports only NVIDIA GPUs. rocm: its
    counterpart. headers: prefixes of the paths in `#include` directives. packages: the Python modules that contain it.
    hipify: whether PyTorch's extension builder translates its includes and calls automatically. note: the remaining
    differences.
    """

    cuda: str
    rocm: str
    headers: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    hipify: bool = False
    note: str = ""


# Headers of libcu++ are listed by name, because projects also have folders called cuda.
_LIBCUXX = ("cuda/std/", "cuda/barrier", "cuda/pipeline", "cuda/atomic", "cuda/ptx", "cuda/semaphore",
            "cuda/functional", "cuda/latch", "cuda/memory_resource", "cuda/annotated_ptr",
            "cuda/stream_ref")  # fmt: skip

LIBRARIES = (
    Library("CUDA's runtime", "HIP", (
        "cuda.h", "cuda_runtime", "cuda_fp16.h", "cuda_bf16.h", "cuda_profiler_api.h"), hipify=True),
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
            ("pynvml", "py3nvml", "nvidia_smi", "GPUtil", "gpustat", "nvitop")),
    Library("CUDA Python", "hip-python", (), ("cuda", "pycuda", "cuda_bindings")),
    Library("cooperative groups", "HIP's cooperative groups, which have no async copies and fewer collectives",
            ("cooperative_groups/",)),
    Library("cooperative groups", "HIP's cooperative groups", ("cooperative_groups.h",), hipify=True,
            note="tiles of 32 lanes are half a wave on CDNA"),
    Library("warp matrix functions (WMMA)", "rocWMMA, or Composable Kernel", ("mma.h", "crt/mma.h")),
    Library("CUDA's FP8 types", "HIP's, in hip/hip_fp8.h: FNUZ on gfx942, OCP on later GPUs", ("cuda_fp8.h",)),
    Library("CUDA's FP4 and FP6 types", "HIP's, in hip/hip_fp4.h, for gfx950", ("cuda_fp4.h", "cuda_fp6.h")),
    Library("CUDA's asynchronous copies", "ordinary loads, or the compiler's own pipelining",
            ("cuda_pipeline", "cuda_awbarrier")),
    Library("libcu++", "libhipcxx", _LIBCUXX),
    Library("NVRTC", "hipRTC", ("nvrtc.h",), hipify=True),
    Library("CUPTI", "ROCprofiler-SDK", ("cupti",)),
    Library("nvJPEG", "rocJPEG", ("nvjpeg.h",)),
    Library("NPP", "RPP", ("npp.h", "nppi")),
    Library("NVSHMEM", "rocSHMEM", ("nvshmem",), ("nvshmem",)),
    Library("OptiX", "HIP RT", ("optix",)),
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


# Command-line tools: NVIDIA's tool → AMD's counterpart.
TOOLS = {
    "nvidia-smi": "amd-smi, or rocm-smi",
    "nvcc": "hipcc, or PyTorch's extension builder",
    "ptxas": "hipcc (--save-temps writes the assembly)",
    "cuobjdump": "llvm-objdump", "nvdisasm": "llvm-objdump",
    "nsys": "rocprofv3", "ncu": "rocprof-compute", "nvprof": "rocprofv3",
    "compute-sanitizer": "AddressSanitizer (hipcc -fsanitize=address)", "cuda-memcheck": "AddressSanitizer",
    "cuda-gdb": "rocgdb",
    "trtexec": "migraphx-driver", "nvidia-cuda-mps-control": "nothing: processes share an AMD GPU without a server",
    "nvidia-ctk": "nothing: pass --device=/dev/kfd --device=/dev/dri to docker",
}  # fmt: skip

# Shared objects that ctypes or dlopen load by name: NVIDIA's name without `lib` and the suffix → AMD's name.
_OBJECTS = {
    "cudart": "libamdhip64.so", "cuda": "libamdhip64.so", "cublas": "libhipblas.so", "cublasLt": "libhipblaslt.so",
    "cudnn": "libMIOpen.so", "cufft": "libhipfft.so", "curand": "libhiprand.so", "cusparse": "libhipsparse.so",
    "cusparseLt": "libhipsparselt.so", "cusolver": "libhipsolver.so", "nvrtc": "libhiprtc.so",
    "nccl": "librccl.so", "nvidia-ml": "libamd_smi.so", "nvToolsExt": "libroctx64.so", "nvinfer": "libmigraphx.so",
    "cupti": "librocprofiler-sdk.so", "nvJitLink": "libhiprtc.so",
}  # fmt: skip
_OBJECT = re.compile(
    rf"(?:^|[/\s])lib({'|'.join(sorted(_OBJECTS, key=len, reverse=True))})(?:_static)?"
    r"(?:[-.\d]*\.(?:so|a|dylib)[.\d]*)?$"
)


def by_object(name: str) -> str | None:
    """Return AMD's counterpart of a shared object such as `libcudart.so.12`, or None if `_OBJECTS` does not list it."""
    match = _OBJECT.search(name) or _OBJECT.search(f"lib{name}")
    return None if match is None else _OBJECTS[match[1]]


def by_package(module: str) -> Library | None:
    """Return the library to which a dotted module name belongs, or None."""
    for library in LIBRARIES:
        if any(module == package or module.startswith(f"{package}.") for package in library.packages):
            return library
    return None


def by_header(header: str) -> Library | None:
    """Return the library to which an included header belongs, or None."""
    for library in LIBRARIES:
        if any(header.startswith(beginning) for beginning in library.headers):
            return library
    return None
