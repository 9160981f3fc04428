"""ModelTesterMixin on a tiny gptj."""

import unittest

from ...thin import CausalTest


class GPTJModelTest(CausalTest, unittest.TestCase):
    model_type = "gptj"
    sizes = {"rotary_dim": 4}  # noqa: RUF012
