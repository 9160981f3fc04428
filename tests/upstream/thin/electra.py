"""ModelTesterMixin on a tiny electra: the encoder and its common heads."""

import unittest

from ...thin import EncoderTest


class ElectraModelTest(EncoderTest, unittest.TestCase):
    model_type = "electra"
    heads = ("MODEL_FOR_MASKED_LM", "MODEL_FOR_SEQUENCE_CLASSIFICATION")
    sizes = {"embedding_size": 16}  # noqa: RUF012
