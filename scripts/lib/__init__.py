"""Shared code of the scripts. Modules that run before the set-up import only the standard library."""
