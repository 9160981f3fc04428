"""The `hf-rocm` command: one thin module per subcommand.

Apart from child processes, only this package and `hf_rocm.check_version` print and set exit codes.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv[1:]` if none is given) and return its exit code.

    0: done, or nothing to do; 1: refused for a reason that the user can fix, or a check found a problem; 2: a usage
    error; 3: a bug in hf-rocm; 128 + n: signal n.
    """
    from hf_rocm.cli.app import run

    return run(arguments)
