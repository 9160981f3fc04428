"""The Triton tier: hf_rocm's kernels, for CDNA and RDNA where aiter doesn't serve a call, and for NVIDIA when forced.

The wrappers (predicate, tiles, launch) are here and don't import triton; the kernels are in `kernels`, which is
imported at the first launch. They run on the Triton that is installed with torch.
"""
