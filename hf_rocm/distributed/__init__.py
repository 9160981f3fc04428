"""Coordinate the ranks that load a model together: they compare their configurations first, and log messages once."""
