"""`hf-rocm warmup`: build and check, in advance, every kernel that a model will use."""

from __future__ import annotations

import sys
import time

from hf_rocm.cli.output import print_json, print_table, print_wrapped
from hf_rocm.cli.parameters import DeviceName, Force, Json, ModelPath


def warmup(model: ModelPath, device: DeviceName = None, force: Force = False, json: Json = False) -> None:
    """Build and check the kernels that MODEL uses, before its first call.

    The model is loaded, and compiling its kernels may take minutes. Results are stored for this GPU and these versions,
    and later processes use them.
    """
    import torch

    from hf_rocm.ops import probe_worker
    from hf_rocm.tools.explain import explain as explain_model
    from hf_rocm.tools.load import load

    began = time.monotonic()
    loaded = load(model, device=device, force=force)
    with torch.no_grad(), probe_worker.progress(lambda text: print(text, file=sys.stderr, flush=True)):
        explanation = explain_model(loaded)
    probe_worker.stop()
    if json:
        print_json({**explanation.to_dict(), "seconds": round(time.monotonic() - began, 1)})
        return
    print_wrapped(f"{explanation.model}: {explanation.state}")
    if not explanation.kernels:
        print("nothing to do")
        return
    rows = [(kernel.operation, kernel.situation, kernel.tier, kernel.kernel) for kernel in explanation.kernels]
    print_table(("operation", "situation", "tier", "kernel"), rows)
    failed = [
        (name, reason) for kernel in explanation.kernels for name, reason in kernel.refused if "check failed" in reason
    ]
    for name, reason in dict.fromkeys(failed):
        print(f"not used: {name}: {reason}", file=sys.stderr)
    print(f"ready after {time.monotonic() - began:.0f} s")
