"""Shared code of the scripts. It uses the standard library only, since it runs before any set-up."""
