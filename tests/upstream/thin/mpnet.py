"""ModelTesterMixin over a tiny mpnet: an encoder, and the heads that people use."""

import unittest

from ...thin import EncoderTest


class MPNetModelTest(EncoderTest, unittest.TestCase):
    model_type = "mpnet"
    heads = ("MODEL_FOR_MASKED_LM", "MODEL_FOR_SEQUENCE_CLASSIFICATION")
