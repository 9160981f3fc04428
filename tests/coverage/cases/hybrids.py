"""Text decoders with recurrent layers, which stay stock: attention, MLPs, experts and norms are served."""

from tests.coverage.case import SMALL, Case

JAMBA = {
    **SMALL,
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 8,
    "use_mamba_kernels": False,
    "attn_implementation": "sdpa",
}
ZAMBA2 = {
    **SMALL,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "layers_block_type": ["hybrid", "mamba", "hybrid"],
    "hybrid_layer_ids": [0, 2],
    "mamba_d_state": 8,
    "mamba_headdim": 16,
    "n_mamba_heads": 8,
    "chunk_size": 4,
    # One block, because 5.0 ties all blocks to the first layer's block.
    "num_mem_blocks": 1,
    "use_shared_attention_adapter": True,
    "adapter_rank": 8,
    "use_mem_rope": True,
    "add_bias_linear": True,
    "use_mamba_kernels": False,
}
HYBRID = {
    **SMALL,
    "layer_types": ["linear_attention", "full_attention"],
    "attention_bias": True,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
RECURRENT = {"assisted": "a recurrent state can't be cropped", "cache": "some releases need a special cache"}

HYBRIDS = [
    Case(
        "jamba",
        "JambaForCausalLM",
        "JambaConfig",
        JAMBA,
        ("JambaAttention",),
        older={"5.0": ("JambaSdpaAttention",)},
        experts={"5.0": "JambaSparseMoeBlock", "99": "JambaExperts"},
        unsupported_by_stock=RECURRENT,
    ),
    Case("zamba2", "Zamba2ForCausalLM", "Zamba2Config", ZAMBA2, ("Zamba2Attention",), unsupported_by_stock=RECURRENT),
    Case(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        HYBRID,
        ("OlmoHybridAttention",),
        since="5.3",
        unsupported_by_stock=RECURRENT,
    ),
    Case(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {**HYBRID, "rope_parameters": None},
        ("OlmoHybridAttention",),
        since="5.3",
        unsupported_by_stock=RECURRENT,
        variant="no positions",
    ),
]
