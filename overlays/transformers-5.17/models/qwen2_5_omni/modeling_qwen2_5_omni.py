"""ROCm overlay of transformers.models.qwen2_5_omni.modeling_qwen2_5_omni, 5.17 and up.

Served: the language models and the vision tower. The audio tower and the codec stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        Qwen2_5OmniAttention,
        Qwen2_5OmniDecoderLayer,
        Qwen2_5OmniMLP,
        Qwen2_5OmniRMSNorm,
        Qwen2_5OmniVisionAttention,
        Qwen2MLP,
        apply_rotary_pos_emb,
        apply_rotary_pos_emb_vision,
    )

    from hf_rocm import layers

    overlay.binds(Qwen2_5OmniRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Qwen2MLP, layers.GatedMLP())
    overlay.binds(Qwen2_5OmniMLP, layers.GatedMLP())
    overlay.binds(Qwen2_5OmniDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(Qwen2_5OmniAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen2_5_omni_attention(
        self,
        stock,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        position_embeddings=None,
        fused=None,
        **kwargs,
    ):
        extra_reason = "the call has no position embeddings" if position_embeddings is None else None
        if layers.fallback_reason(
            self, attention_mask, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason
        ):
            return stock(
                self, hidden_states, attention_mask, position_ids, past_key_values, position_embeddings, **kwargs
            )
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        terms = {"scale": self.scaling, "window": self.sliding_window}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights

    @overlay.replaces(Qwen2_5OmniVisionAttention, fuses=("q", "k", "v"))
    def qwen2_5_omni_vision_attention(
        self, stock, hidden_states, cu_seqlens, *more, position_embeddings=None, **kwargs
    ):
        extra_reason = (
            "the call has no position embeddings, or has extra positional arguments"
            if more or position_embeddings is None
            else None
        )
        if layers.fallback_reason(self, None, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason):
            return stock(self, hidden_states, cu_seqlens, *more, position_embeddings=position_embeddings, **kwargs)
        parts = layers.project(self, hidden_states, "q", "k", "v")  # [T, H · D]
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)  # [T, H, D]
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        output = layers.packed(query, key, value, cu_seqlens, scale=self.scaling)
        return self.proj(output.flatten(1))
