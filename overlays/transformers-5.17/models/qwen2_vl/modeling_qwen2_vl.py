"""ROCm overlay of transformers.models.qwen2_vl.modeling_qwen2_vl, 5.17 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen2_vl.modeling_qwen2_vl import (
        Qwen2MLP,
        Qwen2VLAttention,
        Qwen2VLDecoderLayer,
        Qwen2VLRMSNorm,
        VisionAttention,
        VisionMlp,
        apply_rotary_pos_emb,
        apply_rotary_pos_emb_vision,
    )

    from hf_rocm import layers, ops

    overlay.binds(VisionMlp, layers.PlainMLP(activation="act"))

    overlay.binds(Qwen2VLRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Qwen2MLP, layers.GatedMLP())
    overlay.binds(Qwen2VLDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(Qwen2VLAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen2_vl_attention(
        self,
        stock,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        *more,
        fused=None,
        **kwargs,
    ):
        extra_reason = (
            "the call has no position embeddings, or has extra positional arguments"
            if more or kwargs.get("position_embeddings") is None
            else None
        )
        if layers.fallback_reason(
            self, attention_mask, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason
        ):
            return stock(self, hidden_states, attention_mask, position_ids, past_key_values, *more, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        angles = kwargs["position_embeddings"]
        query, key = layers.rotate(apply_rotary_pos_emb, query, key, angles)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs, angles)
        key, value, seen = layers.visible_keys(
            self, query, key, value, attention_mask, kwargs, window=self.sliding_window
        )
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.pack_outputs(layers.project_out(self, output.flatten(2), fused=fused), weights, past_key_values)

    @overlay.replaces(VisionAttention)
    def qwen2_vl_vision_attention(self, stock, hidden_states, cu_seqlens, *more, position_embeddings=None, **kwargs):
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
