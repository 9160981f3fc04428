"""ModelTesterMixin on a tiny gpt_oss, with sinks, a sliding layer, a full layer and four experts."""

import unittest

from ...thin import CausalTest


class GptOssModelTest(CausalTest, unittest.TestCase):
    model_type = "gpt_oss"
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}  # noqa: RUF012
