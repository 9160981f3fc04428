"""ModelTesterMixin on the text model of a tiny gemma3, with q/k norms, a sliding layer and a full layer."""

import unittest

from ...thin import CausalTest


class Gemma3TextModelTest(CausalTest, unittest.TestCase):
    model_type = "gemma3_text"
    sizes = {  # noqa: RUF012
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
