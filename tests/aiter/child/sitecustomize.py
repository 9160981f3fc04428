"""Imported through PYTHONPATH by the child processes that check kernels, to install the stand-ins there too."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("standins", Path(__file__).parents[1] / "standins.py")
assert spec is not None and spec.loader is not None
standins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(standins)
standins.install()
