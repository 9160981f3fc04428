"""A stand-in for transformers' tests/generation/test_utils.py, which is not in the source distributions."""


class GenerationTesterMixin:
    """Has no tests, because tests/parity covers generation."""
