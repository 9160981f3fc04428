"""Stands in for transformers' tests/exporters/test_export.py, which no source distribution carries."""


class ExportTesterMixin:
    """Without any tests."""
