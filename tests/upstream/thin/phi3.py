"""ModelTesterMixin over a tiny phi3: fused projections."""

import unittest

from ...thin import CausalTest


class Phi3ModelTest(CausalTest, unittest.TestCase):
    model_type = "phi3"
