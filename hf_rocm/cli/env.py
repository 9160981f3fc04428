"""`hf-rocm env`: print a description of this machine to paste into an issue."""

from __future__ import annotations

from hf_rocm.cli.output import print_json
from hf_rocm.cli.parameters import Json


def env(json: Json = False) -> None:
    """Print a description of this machine to paste into an issue.

    It contains versions, GPUs, the relevant variables, and doctor's warnings and problems. Tokens, names and private
    paths are removed; read it before you publish it.
    """
    from hf_rocm.tools.doctor.collect import collect
    from hf_rocm.tools.doctor.machine import ThisMachine
    from hf_rocm.tools.environment_report import block

    text = block(collect(ThisMachine()))
    if json:
        print_json({"environment": text})
    else:
        print(f"```text\n{text}\n```")
