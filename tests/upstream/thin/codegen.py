"""ModelTesterMixin on a tiny codegen."""

import unittest

from ...thin import CausalTest


class CodeGenModelTest(CausalTest, unittest.TestCase):
    model_type = "codegen"
    sizes = {"rotary_dim": 4}  # noqa: RUF012
