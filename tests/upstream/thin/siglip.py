"""ModelTesterMixin on the two towers of a tiny siglip."""

import unittest

import torch
from transformers import SiglipTextConfig, SiglipTextModel, SiglipVisionConfig, SiglipVisionModel

from ...thin import EncoderTest, ids

SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}


class TextTester:
    batch_size, seq_length, is_training = 3, 7, False
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, model_type, sizes):
        pass

    def get_config(self):
        return SiglipTextConfig(vocab_size=99, max_position_embeddings=64, projection_size=32, **SIZES)

    def prepare_config_and_inputs_for_common(self):
        mask = torch.ones(self.batch_size, self.seq_length, dtype=torch.long)
        mask[1, -2:] = 0
        return self.get_config(), {"input_ids": ids(self.batch_size, self.seq_length), "attention_mask": mask}


class VisionTester(TextTester):
    image_size, patch_size, seq_length = 6, 2, 9

    def get_config(self):
        return SiglipVisionConfig(image_size=self.image_size, patch_size=self.patch_size, num_channels=3, **SIZES)

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"pixel_values": torch.randn(self.batch_size, 3, self.image_size, self.image_size)}


class SiglipTextModelTest(EncoderTest, unittest.TestCase):
    model_tester_class = TextTester
    all_model_classes = (SiglipTextModel,)
    test_resize_embeddings = False


class SiglipVisionModelTest(EncoderTest, unittest.TestCase):
    model_tester_class = VisionTester
    all_model_classes = (SiglipVisionModel,)
    test_resize_embeddings = False

    @unittest.skip("the input embeddings of this model are a convolution")
    def test_model_get_set_embeddings(self):
        pass
