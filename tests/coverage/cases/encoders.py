"""Text, image and audio encoders, alone and with a decoder."""

from tests.coverage import inputs
from tests.coverage.case import SMALL, Case

PLAIN = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
# no dropout, because gradients are compared
BERT = {**PLAIN, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE |= {"image_size": 16, "patch_size": 4}

BART = {
    "vocab_size": 131,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 128,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
WHISPER = BART | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64, "suppress_tokens": None}
WHISPER |= {"begin_suppress_tokens": None}


def two_towers(**text):
    return lambda transformers: {
        "text_config": {**PLAIN, "max_position_embeddings": 64, **text},
        "vision_config": IMAGE,
    }


T5 = {
    "vocab_size": 131,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}

QWEN_VISION = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "num_heads": 4}


def qwen_vl(vision, **text):
    patches = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "in_chans": 3}
    rope = {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [4, 2, 2]}}
    return lambda transformers: {
        "text_config": {**SMALL, **rope, **text},
        "vision_config": {**patches, **vision},
        "image_token_id": inputs.IMAGE_TOKEN,
        "video_token_id": inputs.VIDEO_TOKEN,
        "vision_start_token_id": inputs.IMAGE_START,
        "vision_end_token_id": inputs.IMAGE_END,
    }


ENCODERS = [
    Case(
        "bert",
        "BertForMaskedLM",
        "BertConfig",
        BERT,
        ("BertSelfAttention",),
        older={"5.0": ("BertSdpaSelfAttention",)},
        kind="encoder",
    ),
    Case(
        "roberta",
        "RobertaForMaskedLM",
        "RobertaConfig",
        BERT,
        ("RobertaSelfAttention",),
        older={"5.0": ("RobertaSdpaSelfAttention",)},
        kind="encoder",
    ),
    Case("siglip", "SiglipModel", "SiglipConfig", two_towers(), ("SiglipAttention",), kind="towers"),
    Case(
        "siglip2",
        "Siglip2VisionModel",
        "Siglip2VisionConfig",
        IMAGE | {"num_patches": 16},
        ("Siglip2Attention",),
        kind="patches",
    ),
    Case(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        two_towers(projection_dim=32),
        ("CLIPAttention",),
        kind="towers",
    ),
    Case(
        "vit",
        "ViTModel",
        "ViTConfig",
        IMAGE,
        ("ViTAttention",),
        older={"5.9": ("ViTSelfAttention",)},
        kind="image",
    ),
    Case("bart", "BartForConditionalGeneration", "BartConfig", BART, ("BartAttention",), kind="seq2seq"),
    Case("whisper", "WhisperForConditionalGeneration", "WhisperConfig", WHISPER, ("WhisperAttention",), kind="audio"),
    Case("t5", "T5ForConditionalGeneration", "T5Config", T5, ("T5Attention",), kind="seq2seq"),
    Case(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        ("T5Attention",),
        kind="seq2seq",
        variant="gated",
        seed=1,
    ),
    Case(
        "modernbert",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**PLAIN, "num_hidden_layers": 3, "global_attn_every_n_layers": 2, "local_attention": 6, "cls_token_id": 1}
        | {"sep_token_id": 2, "reference_compile": False},
        ("ModernBertAttention",),
        kind="encoder",
    ),
    Case(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        qwen_vl({"embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "depth": 2}),
        ("Qwen2VLAttention", "VisionAttention"),
        kind="images in text",
    ),
    Case(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        qwen_vl(QWEN_VISION | {"depth": 2, "window_size": 16, "fullatt_block_indexes": [1]}),
        ("Qwen2_5_VLAttention", "Qwen2_5_VLVisionAttention"),
        kind="images in text",
    ),
    Case(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        qwen_vl(
            QWEN_VISION | {"depth": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            head_dim=16,
            rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        ),
        ("Qwen3VLTextAttention", "Qwen3VLVisionAttention"),
        since="4.57",
        kind="images in text",
    ),
    Case(
        "eurobert", "EuroBertForMaskedLM", "EuroBertConfig", SMALL, ("EuroBertAttention",), kind="encoder", since="5.3"
    ),
]
