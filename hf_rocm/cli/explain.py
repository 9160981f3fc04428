"""`hf-rocm explain`: show hf_rocm's changes to a model, the kernel of each operation, and why no faster one is used."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_rocm.cli.output import print_json, print_report
from hf_rocm.cli.parameters import DeviceName, Force, Json, ModelPath

All = Annotated[bool, typer.Option("--all", "-a", "-v", help="List every class, kernel and reason.")]


def explain(
    model: ModelPath, device: DeviceName = None, force: Force = False, everything: All = False, json: Json = False
) -> None:
    """Show which kernel serves every operation of MODEL here, and why no faster one is used.

    The model is loaded. Kernels that have not been used on this machine are built and checked first; `warmup` shows the
    progress.
    """
    import torch

    from hf_rocm.tools.explain import explain as explain_model
    from hf_rocm.tools.load import load

    # `generate` also disables gradients.
    with torch.no_grad():
        explanation = explain_model(load(model, device=device, force=force))
    if json:
        print_json(explanation.to_dict())
    elif everything:
        print_report(explanation.details())
    else:
        print(explanation)
