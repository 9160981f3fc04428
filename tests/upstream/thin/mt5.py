"""ModelTesterMixin on a tiny mt5: an encoder, a decoder, cross-attention, and relative position biases."""

import unittest

from ...thin import EncoderDecoderTest


class MT5ModelTest(EncoderDecoderTest, unittest.TestCase):
    model_type = "mt5"
    sizes = {  # noqa: RUF012
        **{"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},
    }
