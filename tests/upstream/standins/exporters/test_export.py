"""A stand-in for transformers' tests/exporters/test_export.py, which is not in the source distributions."""


class ExportTesterMixin:
    """Without any tests."""
