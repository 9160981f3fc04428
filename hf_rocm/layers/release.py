"""Which transformers this is, for the few places where only a signature or a return value changed."""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.version import Version


def before(release: str) -> bool:
    """Whether the transformers in use is older than this release. Call it at import: compilers can't trace it."""
    here = getattr(sys.modules.get("transformers"), "__version__", None) or metadata.version("transformers")
    return Version(here) < Version(release)
