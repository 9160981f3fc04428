"""ROCm overlay of transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe, 5.3 and up.

The decoder layers stay stock: they pass the type of every token to the MoE block, which has separate experts for text
and for images.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeMLP,
        Ernie4_5_VLMoeMoeExperts,
        Ernie4_5_VLMoeRMSNorm,
        Ernie4_5_VLMoeTextAttention,
        Ernie4_5_VLMoeVisionAttention,
        apply_rotary_pos_emb,
        apply_rotary_pos_emb_vision,
    )

    from hf_rocm import layers, ops

    overlay.binds(Ernie4_5_VLMoeRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Ernie4_5_VLMoeMLP, layers.GatedMLP())
    overlay.binds(Ernie4_5_VLMoeMoeExperts, layers.StackedExperts())

    @overlay.replaces(Ernie4_5_VLMoeTextAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def ernie4_5_vl_moe_attention(
        self, stock, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.flatten(2)), weights

    @overlay.replaces(Ernie4_5_VLMoeVisionAttention)
    def ernie4_5_vl_moe_vision_attention(
        self, stock, hidden_states, cu_seqlens, *more, position_embeddings=None, **kwargs
    ):
        extra_reason = (
            "the call has no position embeddings, or has extra positional arguments"
            if more or position_embeddings is None
            else None
        )
        if layers.fallback_reason(self, None, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason):
            return stock(self, hidden_states, cu_seqlens, *more, position_embeddings=position_embeddings, **kwargs)
        query, key, value = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).unbind(1)  # [T, H, D]
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        output = layers.packed(query, key, value, cu_seqlens, scale=self.scaling)
        return self.proj(output.flatten(1))
