"""ModelTesterMixin on a tiny qwen3_moe: four experts."""

import unittest

from ...thin import CausalTest


class Qwen3MoeModelTest(CausalTest, unittest.TestCase):
    model_type = "qwen3_moe"
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}  # noqa: RUF012
