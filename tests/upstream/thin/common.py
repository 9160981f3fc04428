"""Tiny models for transformers' own ModelTesterMixin: the configuration and the inputs that a tester provides.

scripts/lib/upstream_tree.py copies this file to `tests/thin.py` in the folder in which the mixins run.
"""

import random

import torch
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from .generation.test_utils import GenerationTesterMixin
from .test_modeling_common import ModelTesterMixin

# The config of a text model of any type. Models with GQA have more query heads than key heads. A config stores unknown
# names as plain attributes.
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

generator = random.Random(0)


class Tester:
    """The attributes that ModelTesterMixin reads: sizes, a configuration, and matching inputs."""

    batch_size = 3
    seq_length = 7
    is_training = True

    def __init__(self, model_type, sizes):
        self.model_type, self.sizes = model_type, {**SIZES, **sizes}
        for name, value in self.sizes.items():
            setattr(self, name, value)

    def get_config(self):
        return AutoConfig.for_model(self.model_type, **self.sizes)

    def prepare_config_and_inputs_for_common(self):
        mask = torch.ones(self.batch_size, self.seq_length, dtype=torch.long)
        mask[1, :2] = 0
        return self.get_config(), {"input_ids": ids(self.batch_size, self.seq_length), "attention_mask": mask}


class EncoderTest(ModelTesterMixin):
    """ModelTesterMixin on a model type that can't generate: the base model and the named heads."""

    model_type = ""
    heads = ()
    sizes = {}  # noqa: RUF012
    model_tester_class = Tester

    def setUp(self):
        self.model_tester = self.model_tester_class(self.model_type, self.sizes)
        if not self.all_model_classes:
            self.all_model_classes = classes(self.model_type, ("MODEL", *self.heads))


class CausalTest(EncoderTest, GenerationTesterMixin):
    """ModelTesterMixin on a decoder. The mixin requires generation tests, which are empty here."""

    heads = ("MODEL_FOR_CAUSAL_LM",)


class EncoderDecoderTester(Tester):
    is_encoder_decoder = True
    encoder_seq_length = key_length = Tester.seq_length
    # The length of the labels.
    decoder_seq_length = Tester.seq_length

    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        shape = (self.batch_size, self.decoder_seq_length)
        decoder = {"decoder_input_ids": ids(*shape), "decoder_attention_mask": torch.ones(shape, dtype=torch.long)}
        return config, {**inputs, **decoder}


class EncoderDecoderTest(CausalTest):
    """ModelTesterMixin on a text encoder-decoder."""

    heads = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",)
    model_tester_class = EncoderDecoderTester
    is_encoder_decoder = True


def classes(model_type, mappings):
    """Returns the classes that auto classes would choose for a model type."""
    import transformers

    names = [getattr(modeling_auto, f"{mapping}_MAPPING_NAMES")[model_type] for mapping in mappings]
    return tuple(getattr(transformers, name) for name in names)


def ids(*shape, low=3, high=99):
    """Returns random token ids without special tokens."""
    return torch.tensor([generator.randrange(low, high) for _ in range(torch.Size(shape).numel())]).reshape(shape)
