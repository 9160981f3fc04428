"""ModelTesterMixin on a tiny mistral with a sliding window."""

import unittest

from ...thin import CausalTest


class MistralModelTest(CausalTest, unittest.TestCase):
    model_type = "mistral"
    sizes = {"sliding_window": 5}  # noqa: RUF012
