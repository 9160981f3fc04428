"""Find a Python that is new enough. This file must also run on older Pythons."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

OLDEST = (3, 10)


def require_supported_python():
    # type: () -> None
    """Return if this Python is new enough; else run the script again with a newer one, or exit with an error."""
    if sys.version_info >= OLDEST:
        return
    for minor in range(14, OLDEST[1] - 1, -1):
        newer = shutil.which("python3.{}".format(minor))  # noqa: UP032
        if newer:
            os.execv(newer, [newer, *sys.argv])
    version = ".".join(map(str, sys.version_info[:3]))
    sys.exit("error: Python 3.10 or newer is needed\n  found  {} {}".format(sys.executable, version))  # noqa: UP032


def use_base_environment(package="packaging"):
    # type: (str) -> None
    """Return if this package can be imported; else run the script in .envs/base, or exit with an error."""
    require_supported_python()
    if importlib.util.find_spec(package) is not None:
        return
    python = Path(__file__).resolve().parents[2] / ".envs" / "base" / "bin" / "python"
    if python.exists():
        os.execv(str(python), [str(python), *sys.argv])
    sys.exit(
        "error: this Python has no package named {}\n  found  {}\n\n"  # noqa: UP032
        "hint: scripts/test --release 5.23.0 -- tests/coverage -k llama creates .envs/base, which has it".format(
            package, sys.executable
        )
    )
