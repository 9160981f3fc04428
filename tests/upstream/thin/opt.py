"""ModelTesterMixin on a tiny opt."""

import unittest

from ...thin import CausalTest


class OPTModelTest(CausalTest, unittest.TestCase):
    model_type = "opt"
    sizes = {"ffn_dim": 40, "word_embed_proj_dim": 16}  # noqa: RUF012
