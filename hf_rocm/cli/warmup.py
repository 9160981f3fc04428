"""`hf-rocm warmup`: build and check, ahead of time, every kernel that a model will use."""

from __future__ import annotations

import sys
import time

from hf_rocm.cli.output import print_json, print_table
from hf_rocm.cli.parameters import DeviceName, Force, Json, ModelPath


def warmup(model: ModelPath, device: DeviceName = None, force: Force = False, json: Json = False) -> None:
    """Build and check the kernels that MODEL uses, so that its first call finds them ready.

    Made for a Dockerfile's last line on a machine with the GPU: what passed is remembered for this GPU and these
    versions. It loads the model, and may take minutes where kernels have to be compiled.
    """
    import torch

    from hf_rocm.diagnostics.explain import explain as account
    from hf_rocm.diagnostics.load import load
    from hf_rocm.ops import probe_worker

    began = time.monotonic()
    loaded = load(model, device=device, force=force)
    with torch.no_grad(), probe_worker.progress(lambda text: print(text, file=sys.stderr, flush=True)):
        explanation = account(loaded)
    probe_worker.stop()
    if json:
        print_json({**explanation.to_dict(), "seconds": round(time.monotonic() - began, 1)})
        return
    print(f"{explanation.model}: {explanation.state}")
    if not explanation.kernels:
        print("nothing to do")
        return
    rows = [(each.operation, each.situation, each.tier, each.kernel) for each in explanation.kernels]
    print_table(("operation", "situation", "tier", "kernel"), rows)
    failed = [
        (name, reason) for each in explanation.kernels for name, reason in each.refused if "check failed" in reason
    ]
    for name, reason in dict.fromkeys(failed):
        print(f"not used: {name}: {reason}", file=sys.stderr)
    print(f"ready after {time.monotonic() - began:.0f} s")
