"""Text encoders similar to BERT, and mT5 and DeiT."""

from tests.coverage.case import Case
from tests.coverage.cases.encoders import BERT, IMAGE, T5

DISTILBERT = {
    "vocab_size": 131,
    "dim": 64,
    "hidden_dim": 96,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 128,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
}

BERT_RELATIVES = [
    Case(
        "distilbert",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        DISTILBERT,
        ("DistilBertSelfAttention",),
        older={"5.0": ("DistilBertSdpaAttention",)},
        kind="encoder",
    ),
    Case(
        "camembert",
        "CamembertForMaskedLM",
        "CamembertConfig",
        BERT,
        ("CamembertSelfAttention",),
        older={"5.0": ("CamembertSdpaSelfAttention",)},
        kind="encoder",
    ),
    Case(
        "xlm_roberta",
        "XLMRobertaForMaskedLM",
        "XLMRobertaConfig",
        BERT,
        ("XLMRobertaSelfAttention",),
        older={"5.0": ("XLMRobertaSdpaSelfAttention",)},
        kind="encoder",
    ),
    Case(
        "xlm_roberta_xl",
        "XLMRobertaXLForMaskedLM",
        "XLMRobertaXLConfig",
        BERT,
        ("XLMRobertaXLSelfAttention",),
        older={"5.0": ("XLMRobertaXLSdpaSelfAttention",)},
        kind="encoder",
    ),
    Case(
        "electra",
        "ElectraForMaskedLM",
        "ElectraConfig",
        {**BERT, "embedding_size": 32},
        ("ElectraSelfAttention",),
        kind="encoder",
    ),
    Case("ernie", "ErnieForMaskedLM", "ErnieConfig", BERT, ("ErnieSelfAttention",), kind="encoder"),
    Case("roc_bert", "RoCBertForMaskedLM", "RoCBertConfig", BERT, ("RoCBertSelfAttention",), kind="encoder"),
    Case(
        "roberta_prelayernorm",
        "RobertaPreLayerNormForMaskedLM",
        "RobertaPreLayerNormConfig",
        BERT,
        ("RobertaPreLayerNormSelfAttention",),
        kind="encoder",
    ),
    Case(
        "bert_generation",
        "BertGenerationEncoder",
        "BertGenerationConfig",
        BERT,
        ("BertGenerationSelfAttention",),
        kind="encoder",
    ),
    Case("mpnet", "MPNetForMaskedLM", "MPNetConfig", BERT, ("MPNetSelfAttention",), kind="encoder"),
    Case(
        "mt5",
        "MT5ForConditionalGeneration",
        "MT5Config",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        ("MT5Attention",),
        kind="seq2seq",
    ),
    Case(
        "deit",
        "DeiTModel",
        "DeiTConfig",
        IMAGE,
        ("DeiTAttention",),
        older={"5.9": ("DeiTSelfAttention",)},
        kind="image",
    ),
]
