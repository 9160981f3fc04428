"""Text decoders with unusual layers, for example with fused QKV in the checkpoint, or with keys shared by layers."""

from tests.coverage.case import SMALL, Case
from tests.coverage.cases.windows import MIXED

FALCON = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
GPT2 = {
    "vocab_size": 131,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
STABLE = {**SMALL, "use_qkv_bias": True, "partial_rotary_factor": 0.5}


def ministral3(transformers):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 8}
    rope.update(llama_4_scaling_beta=0.5, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    return {**SMALL, "sliding_window": 8, "head_dim": 24, "rope_parameters": rope}


def gemma3n(sharing):
    layers = ["sliding_attention", "full_attention"] * 2
    return {
        **MIXED,
        "layer_types": layers,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": sharing,
        "head_dim": 24,
        "vocab_size_per_layer_input": 131,
        "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
        "intermediate_size": [96] * 4,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    }


def gemma4(sharing):
    shapes = {
        "head_dim": 24,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 131,
        "hidden_size_per_layer_input": 16,
    }
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    return {**MIXED, **shapes, **layers, "num_kv_shared_layers": sharing, "attention_bias": True}


def phi4_multimodal(transformers):
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    image = {"image_size": 28, "patch_size": 14, "crop_size": 28, "num_img_tokens": 4, "image_token_id": 129}
    audio = {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16}
    audio.update(input_size=16, num_blocks=1, downsample_rate=1, bias_max_distance=8, audio_token_id=128)
    towers = {"vision_config": {**tower, **image, "num_hidden_layers": 2}, "audio_config": {**tower, **audio}}
    return {**SMALL, **towers, "sliding_window": 8, "partial_rotary_factor": 0.5}


SHAPES = [
    Case(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**FALCON, "rotary_pct": 0.5, "attention_bias": True},
        ("GPTNeoXAttention",),
    ),
    Case(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT2, **NO_DROPOUT, "scale_attn_by_inverse_layer_idx": True},
        ("GPT2Attention",),
    ),
    Case(
        "falcon",
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
        ("FalconAttention",),
    ),
    Case(
        "falcon",
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "multi_query": True},
        ("FalconAttention",),
        variant="one key head",
        unsupported_by_stock={"static": "up to 4.53 its static cache has one key head per query head"},
    ),
    Case(
        "stablelm",
        "StableLmForCausalLM",
        "StableLmConfig",
        {**STABLE, "use_parallel_residual": True},
        ("StableLmAttention",),
        older={"5.0": ("StableLmSdpaAttention",)},
    ),
    Case(
        "stablelm",
        "StableLmForCausalLM",
        "StableLmConfig",
        {**STABLE, "qk_layernorm": True},
        ("StableLmAttention",),
        # In 4.x, stock can't initialise the per-head norms.
        since="5.0",
        variant="head norms",
    ),
    Case(
        "nemotron",
        "NemotronForCausalLM",
        "NemotronConfig",
        {**SMALL, "head_dim": 24, "attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 0.5},
        ("NemotronAttention",),
        older={"5.13": ("NemotronSdpaAttention",)},
    ),
    Case("ministral3", "Ministral3ForCausalLM", "Ministral3Config", ministral3, ("Ministral3Attention",), since="5.0"),
    Case(
        "qwen3_5",
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {
            **SMALL,
            "head_dim": 24,
            "layer_types": ["linear_attention", "full_attention"],
            "attention_bias": True,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        ("Qwen3_5Attention",),
        since="5.2",
        unsupported_by_stock={"assisted": "a recurrent state can't be cropped"},
    ),
    Case("gemma3n", "Gemma3nForCausalLM", "Gemma3nTextConfig", gemma3n(2), ("Gemma3nTextAttention",), since="4.56"),
    Case(
        "gemma3n",
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        gemma3n(0),
        ("Gemma3nTextAttention",),
        variant="own keys",
        unsupported_by_stock={"static": "from 4.56 to 5.0 its static cache is empty if no layers share keys"},
    ),
    Case("gemma4", "Gemma4ForCausalLM", "Gemma4TextConfig", gemma4(2), ("Gemma4TextAttention",), since="5.5"),
    Case(
        "gemma4",
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**gemma4(0), "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        ("Gemma4TextAttention",),
        since="5.5",
        variant="keys as values",
    ),
    Case(
        "phi4_multimodal",
        "Phi4MultimodalForCausalLM",
        "Phi4MultimodalConfig",
        phi4_multimodal,
        ("Phi4MultimodalAttention",),
    ),
]
