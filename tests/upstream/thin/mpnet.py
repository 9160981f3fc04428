"""ModelTesterMixin on a tiny mpnet: the encoder and its common heads."""

import unittest

from ...thin import EncoderTest


class MPNetModelTest(EncoderTest, unittest.TestCase):
    model_type = "mpnet"
    heads = ("MODEL_FOR_MASKED_LM", "MODEL_FOR_SEQUENCE_CLASSIFICATION")
