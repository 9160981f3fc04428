"""Overlays: what binds our forwards to stock classes, and what puts overlay files on disk.

This package is imported by every installed block, so it imports the dispatcher alone; the catalogue, the
planner and the installer are imported by those who need them.
"""

from hf_rocm.overlay.bind import Binding, binding_of, bindings, mode_of, replaces, set_mode, unbind, wanted

__all__ = ["Binding", "binding_of", "bindings", "mode_of", "replaces", "set_mode", "unbind", "wanted"]
