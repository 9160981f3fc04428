"""The Triton tier: hf_rocm's kernels, for CDNA and RDNA where aiter doesn't serve a call, and for NVIDIA when forced.

The wrappers (predicate, tiles, launch) are here and import triton only when they need it. The kernels are in `kernels`,
whose modules import triton and are imported at the first launch. They use the Triton that is installed with torch.
"""
