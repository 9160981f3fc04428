"""Encoder-decoders with BART's attention."""

from tests.coverage.case import Case
from tests.coverage.cases.encoders import BART


def bart_like(overlay, name, **kwargs):
    attention = f"{name}Attention"
    return Case(
        overlay, f"{name}ForConditionalGeneration", f"{name}Config", {**BART, **kwargs}, (attention,), kind="seq2seq"
    )


BART_RELATIVES = [
    bart_like("mbart", "MBart", scale_embedding=True),
    bart_like("pegasus", "Pegasus"),
    Case("marian", "MarianMTModel", "MarianConfig", BART, ("MarianAttention",), kind="seq2seq"),
    bart_like("m2m_100", "M2M100", encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    bart_like("blenderbot", "Blenderbot"),
    bart_like("blenderbot_small", "BlenderbotSmall"),
    bart_like("plbart", "PLBart"),
]
