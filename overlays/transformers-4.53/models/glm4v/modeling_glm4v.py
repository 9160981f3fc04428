"""ROCm overlay of transformers.models.glm4v.modeling_glm4v, 4.53 to 4.57."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.glm4v.modeling_glm4v import (
        Glm4VisionMlp,
        Glm4vRMSNorm,
        Glm4vTextAttention,
        Glm4vTextMLP,
        Glm4vVisionAttention,
        apply_multimodal_rotary_pos_emb,
        apply_rotary_pos_emb_vision,
    )

    from hf_rocm import layers, ops

    overlay.binds(Glm4vRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Glm4VisionMlp, layers.GatedMLP())
    overlay.binds(Glm4vTextMLP, layers.JoinedMLP())

    @overlay.replaces(Glm4vTextAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def glm4v_attention(
        self,
        stock,
        hidden_states,
        position_embeddings,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        **kwargs,
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(
                self, hidden_states, position_embeddings, attention_mask, position_ids, past_key_values, **kwargs
            )
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        sections = self.rope_scaling["mrope_section"]
        query, key = apply_multimodal_rotary_pos_emb(query, key, *position_embeddings, sections)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.pack_outputs(self.o_proj(output.flatten(2)), weights, past_key_values)

    @overlay.replaces(Glm4vVisionAttention)
    def glm4v_vision_attention(self, stock, hidden_states, cu_seqlens, *more, position_embeddings=None, **kwargs):
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
