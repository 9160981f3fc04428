"""A stand-in for transformers' tests/exporters/test_export.py, which is not in the source distributions."""


class ExportTesterMixin:
    """Has no tests."""
