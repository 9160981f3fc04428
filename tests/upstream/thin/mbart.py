"""ModelTesterMixin on a tiny mbart: an encoder, a decoder, and cross-attention."""

import unittest

from ...thin import EncoderDecoderTest


class MBartModelTest(EncoderDecoderTest, unittest.TestCase):
    model_type = "mbart"
    sizes = {  # noqa: RUF012
        **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2},
    }
