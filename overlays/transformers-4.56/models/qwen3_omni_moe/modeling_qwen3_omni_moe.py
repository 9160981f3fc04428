"""ROCm overlay of transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe, 4.57 and up.

Served: the language model, the vision tower's attention, and the attention and norms of the talker's layers, which use
the classes of the language model. The audio tower, the rest of the talker and the codec stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
        Qwen3OmniMoeThinkerTextAttention,
        Qwen3OmniMoeThinkerTextDecoderLayer,
        Qwen3OmniMoeThinkerTextMLP,
        Qwen3OmniMoeThinkerTextRMSNorm,
        Qwen3OmniMoeVisionAttention,
        apply_rotary_pos_emb,
        apply_rotary_pos_emb_vision,
    )

    from hf_rocm import layers

    overlay.binds(Qwen3OmniMoeThinkerTextRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Qwen3OmniMoeThinkerTextMLP, layers.GatedMLP())
    overlay.binds_first(
        "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe",
        Qwen3OmniMoeThinkerTextExperts=layers.StackedExperts(),
        Qwen3OmniMoeThinkerTextSparseMoeBlock=layers.SoftmaxMoE(normalise="norm_topk_prob"),
    )
    overlay.binds(Qwen3OmniMoeThinkerTextDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(Qwen3OmniMoeThinkerTextAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen3_omni_moe_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        names, norms = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
        heads = layers.heads(self, hidden_states, *names, fused=fused)
        terms = {"scale": self.scaling, "norms": norms, "window": self.sliding_window}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights

    @overlay.replaces(Qwen3OmniMoeVisionAttention)
    def qwen3_omni_moe_vision_attention(
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
