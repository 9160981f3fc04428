"""ModelTesterMixin on a tiny camembert: the encoder and its common heads."""

import unittest

from ...thin import EncoderTest


class CamembertModelTest(EncoderTest, unittest.TestCase):
    model_type = "camembert"
    heads = ("MODEL_FOR_MASKED_LM", "MODEL_FOR_SEQUENCE_CLASSIFICATION")
