"""`hf-rocm explain`: what hf_rocm does to a model, which kernel each operation uses, and why not a faster one."""

from __future__ import annotations

from hf_rocm.cli.output import print_json
from hf_rocm.cli.parameters import DeviceName, Force, Json, ModelPath


def explain(model: ModelPath, device: DeviceName = None, force: Force = False, json: Json = False) -> None:
    """Load MODEL and say what serves it here, and why nothing faster does.

    Kernels that were never used on this machine are built and checked on the way; `warmup` shows that at work.
    """
    import torch

    from hf_rocm.diagnostics.explain import explain as account
    from hf_rocm.diagnostics.load import load

    with torch.no_grad():  # as generate calls it
        explanation = account(load(model, device=device, force=force))
    if json:
        print_json(explanation.to_dict())
    else:
        print(explanation)
