"""Stands in for transformers' tests/generation/test_utils.py, which no source distribution carries."""


class GenerationTesterMixin:
    """Without any tests: what generates is compared in tests/parity."""
