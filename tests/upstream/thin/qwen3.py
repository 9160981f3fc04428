"""ModelTesterMixin over a tiny qwen3."""

import unittest

from ...thin import CausalTest


class Qwen3ModelTest(CausalTest, unittest.TestCase):
    model_type = "qwen3"
