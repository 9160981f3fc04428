"""ModelTesterMixin over a tiny olmo2."""

import unittest

from ...thin import CausalTest


class Olmo2ModelTest(CausalTest, unittest.TestCase):
    model_type = "olmo2"
