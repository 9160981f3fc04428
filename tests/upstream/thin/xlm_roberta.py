"""ModelTesterMixin on a tiny xlm_roberta: the encoder and its common heads."""

import unittest

from ...thin import EncoderTest


class XLMRobertaModelTest(EncoderTest, unittest.TestCase):
    model_type = "xlm-roberta"
    heads = ("MODEL_FOR_MASKED_LM", "MODEL_FOR_SEQUENCE_CLASSIFICATION")
