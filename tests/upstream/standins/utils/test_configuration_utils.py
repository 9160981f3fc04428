"""Stands in for transformers' tests/utils/test_configuration_utils.py, which no source distribution carries."""

config_common_kwargs: dict[str, object] = {}
