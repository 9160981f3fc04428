"""`hf-rocm env`: a block about this machine, to paste into an issue."""

from __future__ import annotations

from hf_rocm.cli.output import print_json
from hf_rocm.cli.parameters import Json


def env(json: Json = False) -> None:
    """Print what an issue needs: versions, GPUs, the variables that matter, and what doctor objects to.

    Made to be pasted in public: no tokens, no names, no private paths. Look it over all the same.
    """
    from hf_rocm.diagnostics.doctor.collect import collect
    from hf_rocm.diagnostics.doctor.machine import ThisMachine
    from hf_rocm.diagnostics.environment import block

    text = block(collect(ThisMachine()))
    if json:
        print_json({"environment": text})
    else:
        print(f"```text\n{text}\n```")
