"""Find a Python that is new enough. Written for older ones, which is who needs it."""

import os
import shutil
import sys

OLDEST = (3, 10)


def require_supported_python():
    # type: () -> None
    """Return if this Python will do; else start the script again under one that will, or say what is missing."""
    if sys.version_info >= OLDEST:
        return
    for minor in range(14, OLDEST[1] - 1, -1):
        found = shutil.which("python3.{}".format(minor))  # noqa: UP032
        if found:
            os.execv(found, [found, *sys.argv])
    version = ".".join(map(str, sys.version_info[:3]))
    sys.exit("error: Python 3.10 or newer is needed\n  found  {} {}".format(sys.executable, version))  # noqa: UP032
