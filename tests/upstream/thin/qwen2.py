"""ModelTesterMixin over a tiny qwen2."""

import unittest

from ...thin import CausalTest


class Qwen2ModelTest(CausalTest, unittest.TestCase):
    model_type = "qwen2"
