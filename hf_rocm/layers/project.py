"""Linear layers that read the same input: one product where the loader fused them, one each where not."""

from __future__ import annotations

from torch import Tensor, nn

from hf_rocm.weights import fuse


def project(module: nn.Module, x: Tensor, *names: str) -> tuple[Tensor, ...]:
    """The outputs of the named linear children of module, in order.

    x: [..., K]. Returns a [..., N_i] for each name; parts of one tensor when the fused weights ran.
    """
    parts = fuse.project(module, x)
    if parts is not None:
        return parts
    return tuple(module._modules[name](x) for name in names)  # type: ignore[misc]
