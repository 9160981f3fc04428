"""ModelTesterMixin on a tiny whisper: an audio encoder, a decoder, and cross-attention."""

import unittest

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration, WhisperModel

from ...thin import CausalTest, ids


class WhisperTester:
    batch_size, is_training = 3, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    frames, seq_length = 24, 5
    # The length after the second convolution, which halves the number of frames.
    encoder_seq_length = key_length = 12
    decoder_seq_length = 5

    def __init__(self, model_type, sizes):
        pass

    def get_config(self):
        return WhisperConfig(
            vocab_size=99,
            d_model=self.hidden_size,
            encoder_layers=self.num_hidden_layers,
            decoder_layers=self.num_hidden_layers,
            encoder_attention_heads=self.num_attention_heads,
            decoder_attention_heads=self.num_attention_heads,
            encoder_ffn_dim=40,
            decoder_ffn_dim=40,
            num_mel_bins=8,
            max_source_positions=self.encoder_seq_length,
            max_target_positions=40,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {
            "input_features": torch.randn(self.batch_size, 8, self.frames),
            "decoder_input_ids": ids(self.batch_size, self.seq_length),
            "decoder_attention_mask": torch.ones(self.batch_size, self.seq_length, dtype=torch.long),
        }


class WhisperModelTest(CausalTest, unittest.TestCase):
    model_tester_class = WhisperTester
    all_model_classes = (WhisperModel, WhisperForConditionalGeneration)
    is_encoder_decoder = True
    test_missing_keys = False
    test_resize_embeddings = False

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        if return_labels and model_class is WhisperForConditionalGeneration:
            inputs["labels"] = torch.full((self.model_tester.batch_size, self.model_tester.seq_length), 7)
        return inputs
