"""Text decoders with a softcap, or with sliding windows in some or all layers, and Mistral also without windows."""

from tests.coverage.case import SMALL, Case

# Shorter than the prompts, so that prefill, decoding and chunks all exceed it.
WINDOW = {**SMALL, "sliding_window": 8}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {**MIXED, "head_dim": 24, "query_pre_attn_scalar": 20, "attention_bias": True}

WINDOWS = [
    Case("mistral", "MistralForCausalLM", "MistralConfig", {**WINDOW, "head_dim": 24}, ("MistralAttention",)),
    Case("mistral", "MistralForCausalLM", "MistralConfig", SMALL, ("MistralAttention",), variant="full"),
    Case(
        "qwen2",
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 1, "tie_word_embeddings": True},
        ("Qwen2Attention",),
    ),
    # 5.23 selects eager; releases up to at least 5.19 select sdpa, which omits the softcap
    Case(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "attn_implementation": "eager"},
        ("Gemma2Attention",),
    ),
    Case("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA, ("Gemma3Attention",)),
    Case("phi3", "Phi3ForCausalLM", "Phi3Config", {**WINDOW, "partial_rotary_factor": 0.5}, ("Phi3Attention",)),
    Case("olmo3", "Olmo3ForCausalLM", "Olmo3Config", MIXED, ("Olmo3Attention",), since="4.57"),
    Case(
        "smollm3",
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {**MIXED, "use_sliding_window": True, "no_rope_layers": [0, 1], "attention_bias": True},
        ("SmolLM3Attention",),
    ),
    Case(
        "ministral",
        "MinistralForCausalLM",
        "MinistralConfig",
        {**MIXED, "head_dim": 24},
        ("MinistralAttention",),
        since="4.57",
    ),
    Case("exaone4", "Exaone4ForCausalLM", "Exaone4Config", MIXED, ("Exaone4Attention",), since="4.54"),
    Case("cohere2", "Cohere2ForCausalLM", "Cohere2Config", {**MIXED, "attention_bias": True}, ("Cohere2Attention",)),
    Case(
        "starcoder2",
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        WINDOW,
        ("Starcoder2Attention",),
    ),
    Case("cwm", "CwmForCausalLM", "CwmConfig", {**MIXED, "head_dim": 24}, ("CwmAttention",), since="5.0"),
    Case(
        "vaultgemma",
        "VaultGemmaForCausalLM",
        "VaultGemmaConfig",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "attn_implementation": "eager"},
        ("VaultGemmaAttention",),
        since="4.57",
    ),
    Case(
        "granite_swa",
        "GraniteSWAForCausalLM",
        "GraniteSWAConfig",
        {**MIXED, "attention_multiplier": 0.25, "residual_multiplier": 0.7, "attention_bias": True, "mlp_bias": True},
        ("GraniteSWAAttention",),
        since="5.15",
    ),
]
