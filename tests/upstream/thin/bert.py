"""ModelTesterMixin over a tiny bert: an encoder, and the heads that people use."""

import unittest

from ...thin import EncoderTest


class BertModelTest(EncoderTest, unittest.TestCase):
    model_type = "bert"
    heads = ("MODEL_FOR_MASKED_LM", "MODEL_FOR_SEQUENCE_CLASSIFICATION")
