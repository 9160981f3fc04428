"""ModelTesterMixin on a tiny bert: the encoder and its common heads."""

import unittest

from ...thin import EncoderTest


class BertModelTest(EncoderTest, unittest.TestCase):
    model_type = "bert"
    heads = ("MODEL_FOR_MASKED_LM", "MODEL_FOR_SEQUENCE_CLASSIFICATION")
