"""The Triton tier: kernels of our own, for CDNA and RDNA where aiter's don't serve, and for NVIDIA when forced.

Wrappers (predicate, tiles, launch) live here and import no triton; the kernels are in `kernels`, imported when the
first of them is launched. The Triton that is installed beside torch is used, never one of ours.
"""
