"""ModelTesterMixin over a tiny gemma."""

import unittest

from ...thin import CausalTest


class GemmaModelTest(CausalTest, unittest.TestCase):
    model_type = "gemma"
