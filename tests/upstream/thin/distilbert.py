"""ModelTesterMixin on a tiny distilbert: the encoder and its common heads."""

import unittest

from ...thin import EncoderTest


class DistilBertModelTest(EncoderTest, unittest.TestCase):
    model_type = "distilbert"
    heads = ("MODEL_FOR_MASKED_LM", "MODEL_FOR_SEQUENCE_CLASSIFICATION")
    sizes = {"hidden_dim": 40}  # noqa: RUF012
