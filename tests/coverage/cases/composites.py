"""Composite models, whose parts are served by the overlays of their types."""

from tests.coverage import inputs
from tests.coverage.case import SMALL, Case
from tests.coverage.cases.encoders import IMAGE

GEMMA = {**SMALL, "model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1}
PALIGEMMA = {"projection_dim": 64, "image_token_index": inputs.IMAGE_TOKEN, "pad_token_id": 0, "eos_token_id": 2}
LLAVA = {"image_token_index": inputs.IMAGE_TOKEN, "image_seq_length": 16}
MISTRAL = {**SMALL, "model_type": "mistral", "head_dim": 16, "sliding_window": None}

COMPOSITES = [
    Case(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {**PALIGEMMA, "text_config": GEMMA, "vision_config": {**IMAGE, "model_type": "siglip_vision_model"}},
        ("GemmaAttention", "SiglipAttention"),
        kind="image and text",
    ),
    Case(
        "llava",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            **LLAVA,
            "text_config": {**SMALL, "model_type": "llama"},
            "vision_config": {**IMAGE, "num_hidden_layers": 3, "model_type": "clip_vision_model"},
        },
        ("LlamaAttention", "CLIPAttention"),
        kind="image and text",
    ),
    Case(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "image_token_index": inputs.IMAGE_TOKEN,
            "spatial_merge_size": 2,
            "text_config": MISTRAL,
            "vision_config": {**IMAGE, "model_type": "pixtral", "head_dim": 16},
        },
        ("MistralAttention", "PixtralAttention"),
        kind="image and text",
        image_tokens=4,
    ),
]
