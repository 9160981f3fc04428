"""Coordinate ranks that load a model together: they compare facts first, and log messages once."""
