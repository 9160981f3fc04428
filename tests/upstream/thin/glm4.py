"""ModelTesterMixin over a tiny glm4: partial rotary, four norms a layer."""

import unittest

from ...thin import CausalTest


class Glm4ModelTest(CausalTest, unittest.TestCase):
    model_type = "glm4"
