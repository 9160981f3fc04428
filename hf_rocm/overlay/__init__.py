"""Overlays: binding forwards to stock classes in memory, and installing overlay files on disk.

Every installed overlay imports this package, so it imports only the dispatcher and the declarations. The catalogue, the
planner and the installer are imported only where they are needed.
"""

from hf_rocm.overlay.bind import Binding, binding_of, bindings, mode_of, replaces, set_mode, unbind, wanted
from hf_rocm.overlay.declare import binds, binds_first

__all__ = [
    "Binding",
    "binding_of",
    "bindings",
    "binds",
    "binds_first",
    "mode_of",
    "replaces",
    "set_mode",
    "unbind",
    "wanted",
]
