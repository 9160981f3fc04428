"""ModelTesterMixin on a tiny mixtral: four experts."""

import unittest

from ...thin import CausalTest


class MixtralModelTest(CausalTest, unittest.TestCase):
    model_type = "mixtral"
    sizes = {"num_local_experts": 4}  # noqa: RUF012
