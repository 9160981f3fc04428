"""A stand-in for transformers' tests/utils/test_configuration_utils.py, which is not in the source distributions."""

config_common_kwargs: dict[str, object] = {}
