"""ModelTesterMixin over a tiny llama."""

import unittest

from ...thin import CausalTest


class LlamaModelTest(CausalTest, unittest.TestCase):
    model_type = "llama"
