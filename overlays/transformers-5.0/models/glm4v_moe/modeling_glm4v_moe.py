"""ROCm overlay of transformers.models.glm4v_moe.modeling_glm4v_moe, 5.0 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.glm4v_moe.modeling_glm4v_moe import (
        Glm4vMoeisionMlp,
        Glm4vMoeRMSNorm,
        Glm4vMoeTextAttention,
        Glm4vMoeTextDecoderLayer,
        Glm4vMoeTextMLP,
        Glm4vMoeTextRMSNorm,
        Glm4vMoeVisionAttention,
        apply_rotary_pos_emb,
        apply_rotary_pos_emb_vision,
    )

    from hf_rocm import layers

    overlay.binds(Glm4vMoeRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Glm4vMoeTextRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Glm4vMoeisionMlp, layers.GatedMLP())
    overlay.binds(Glm4vMoeTextMLP, layers.GatedMLP())
    overlay.binds_first(
        "transformers.models.glm4v_moe.modeling_glm4v_moe",
        Glm4vMoeTextExperts=layers.StackedExperts(),
        Glm4vMoeTextNaiveMoe=layers.StackedExperts(),
    )
    overlay.binds(Glm4vMoeTextDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(Glm4vMoeTextAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def glm4v_moe_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        terms = {"scale": self.scaling}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights

    @overlay.replaces(Glm4vMoeVisionAttention)
    def glm4v_moe_vision_attention(self, stock, hidden_states, cu_seqlens, *more, position_embeddings=None, **kwargs):
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
