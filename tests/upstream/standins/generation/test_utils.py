"""A stand-in for transformers' tests/generation/test_utils.py, which is not in the source distributions."""


class GenerationTesterMixin:
    """Without any tests: tests/parity compares generation."""
