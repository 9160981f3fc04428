"""Shared code of the scripts. It uses only the standard library, because it runs before any set-up."""
