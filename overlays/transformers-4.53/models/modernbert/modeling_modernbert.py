"""ROCm overlay of transformers.models.modernbert.modeling_modernbert, 4.53 to 5.0."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.modernbert.modeling_modernbert import (
        MODERNBERT_ATTENTION_FUNCTION,  # noqa: F401 - the functions that ops.attention replaces
        ModernBertAttention,
        ModernBertMLP,
        ModernBertRotaryEmbedding,
        apply_rotary_pos_emb,
        sdpa_attention_forward,  # noqa: F401
    )

    from hf_rocm import layers, ops

    overlay.binds(ModernBertRotaryEmbedding, layers.RotaryEmbedding())

    @overlay.replaces(ModernBertAttention)
    def modernbert_attention(self, stock, hidden_states, *more, **kwargs):
        local = self.local_attention != (-1, -1)
        mask = kwargs.get("sliding_window_mask" if local else "attention_mask")
        extra_reason = "the call has extra positional arguments" if more else None
        if layers.fallback_reason(self, mask, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason):
            return stock(self, hidden_states, *more, **kwargs)
        qkv = self.Wqkv(hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim))  # [B, S, 3, H, D]
        angles = kwargs.get("position_embeddings")
        if angles is None:
            angles = self.rotary_emb(qkv, position_ids=kwargs.get("position_ids"))
        query, key, value = qkv.transpose(3, 1).unbind(dim=2)  # [B, H, S, D]
        query, key = layers.rotate(apply_rotary_pos_emb, query, key, angles)
        key, value, seen = layers.visible_keys(self, query, key, value, mask, {"is_causal": False})
        output, _ = ops.attention(query, key, value, scale=self.head_dim**-0.5, **seen)
        return (self.out_drop(self.Wo(output.flatten(2))),)

    @overlay.replaces(ModernBertMLP)
    def modernbert_mlp(self, stock, hidden_states):
        # `Wi` joins gate and up in one matrix.
        return self.Wo(self.drop(layers.activated(self.Wi(hidden_states), self.act)))
