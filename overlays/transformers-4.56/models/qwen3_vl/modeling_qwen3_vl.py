"""ROCm overlay of transformers.models.qwen3_vl.modeling_qwen3_vl, 4.57 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen3_vl.modeling_qwen3_vl import (
        Qwen3VLTextAttention,
        Qwen3VLTextDecoderLayer,
        Qwen3VLTextMLP,
        Qwen3VLTextRMSNorm,
        Qwen3VLVisionAttention,
        apply_rotary_pos_emb,
        apply_rotary_pos_emb_vision,
    )

    from hf_rocm import layers

    overlay.binds(Qwen3VLTextRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Qwen3VLTextMLP, layers.GatedMLP())
    overlay.binds(Qwen3VLTextDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(Qwen3VLTextAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen3_vl_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        names, norms = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
        heads = layers.heads(self, hidden_states, *names, fused=fused)
        terms = {"scale": self.scaling, "norms": norms}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights

    @overlay.replaces(Qwen3VLVisionAttention)
    def qwen3_vl_vision_attention(self, stock, hidden_states, cu_seqlens, *more, position_embeddings=None, **kwargs):
        extra_reason = (
            "the call has no position embeddings, or has extra positional arguments"
            if more or position_embeddings is None
            else None
        )
        dropout = getattr(self, "attention_dropout", 0.0)
        if layers.fallback_reason(self, None, kwargs, dropout=dropout, extra_reason=extra_reason):
            return stock(self, hidden_states, cu_seqlens, *more, position_embeddings=position_embeddings, **kwargs)
        query, key, value = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).unbind(1)  # [T, H, D]
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        output = layers.packed(query, key, value, cu_seqlens, scale=self.scaling)
        return self.proj(output.flatten(1))
