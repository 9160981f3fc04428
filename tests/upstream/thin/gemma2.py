"""ModelTesterMixin on a tiny gemma2, with a softcap, a sliding layer and a full layer."""

import unittest

from ...thin import CausalTest


class Gemma2ModelTest(CausalTest, unittest.TestCase):
    model_type = "gemma2"
    sizes = {"sliding_window": 5, "query_pre_attn_scalar": 8}  # noqa: RUF012
