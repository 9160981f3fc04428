"""Choose the BLAS library of PyTorch's own GEMMs for a block of calls, through PyTorch's setting.

PyTorch uses the names of NVIDIA's libraries, with aliases for AMD's. Newer releases have more of these aliases. On ROCm
`cublas` is hipBLAS, which uses rocBLAS.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rocm.device import is_rocm
from hf_rocm.errors import OptionError

# hf_rocm's name: PyTorch's names for the library, in order of preference.
LIBRARIES = {
    "hipblaslt": ("hipblaslt", "cublaslt"),
    "rocblas": ("hipblas", "cublas"),
    "ck": ("ck",),
}


def check(library: str) -> None:
    """Raise `OptionError` unless the installed PyTorch can be switched to this library."""
    reason = _refusal(library)
    if reason is not None:
        raise OptionError(
            f"linear_backend={library!r} can't be honoured",
            facts={"reason": reason, "torch": torch.__version__},
            hint="use linear_backend='auto'",
        )


@contextmanager
def prefer(library: str) -> Iterator[None]:
    """Within the block, PyTorch's GEMMs use this library. The previous preference is restored afterwards.

    The switch is global: it also affects other threads while the block runs.
    """
    switch: Any = torch.backends.cuda.preferred_blas_library
    before = switch()
    switch(_name(library))
    try:
        yield
    finally:
        switch(before)


def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None, library: str) -> Tensor:
    """`F.linear` through this library. In compiled code, an operator sets the library at run time.

    In code that is compiled while gradients are enabled, PyTorch selects the library.
    """
    if not torch.compiler.is_compiling():
        with prefer(library):
            return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        # The operator has no gradient.
        return F.linear(x, weight, bias)
    result: Tensor = torch.ops.hf_rocm.library_linear(x, weight, bias, library)
    return result


def _refusal(library: str) -> str | None:
    if not is_rocm():
        return "this PyTorch is not a ROCm build"
    if getattr(torch.backends.cuda, "preferred_blas_library", None) is None:
        return "this PyTorch has no switch for its BLAS library"
    name = _name(library)
    if name is None:
        return f"this PyTorch has only {', '.join(_known())}"
    with warnings.catch_warnings():
        # Do not show warnings about an experimental setting, or about a fallback to another library.
        warnings.simplefilter("ignore")
        try:
            with prefer(library):
                chosen: Any = torch.backends.cuda.preferred_blas_library()
        except RuntimeError as error:
            return str(error).splitlines()[0]
    if chosen != _known()[name]:
        return f"PyTorch chose {chosen} instead on this machine"
    return None


def _name(library: str) -> str | None:
    return next((name for name in LIBRARIES[library] if name in _known()), None)


def _known() -> dict[str, Any]:
    known: dict[str, Any] = getattr(torch.backends.cuda, "_BlasBackends", {})
    return known


def _library_linear(x: Tensor, weight: Tensor, bias: Tensor | None, library: str) -> Tensor:
    with prefer(library):
        return F.linear(x, weight, bias)


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None, library: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_operators = torch.library.Library("hf_rocm", "FRAGMENT")
_operators.define("library_linear(Tensor x, Tensor weight, Tensor? bias, str library) -> Tensor")
_operators.impl("library_linear", _library_linear, "CompositeExplicitAutograd")
torch.library.register_fake("hf_rocm::library_linear", _shape, lib=_operators)
