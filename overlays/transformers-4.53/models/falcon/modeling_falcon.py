"""ROCm overlay of transformers.models.falcon.modeling_falcon, 4.53 and up.

Served: attention with rotary positions. Attention with ALiBi, the MLP (which has no gate) and LayerNorm stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.falcon.modeling_falcon import FalconAttention, FalconRotaryEmbedding, apply_rotary_pos_emb

    from hf_rocm import layers, ops

    overlay.binds(FalconRotaryEmbedding, layers.RotaryEmbedding())

    with_cache = layers.before("4.54")

    @overlay.replaces(FalconAttention)
    def falcon_attention(self, stock, hidden_states, *more, **kwargs):
        mask, cache, extra_reason = kwargs.get("attention_mask"), kwargs.get("layer_past"), _refusal(more, kwargs)
        if layers.fallback_reason(self, mask, kwargs, extra_reason=extra_reason):
            return stock(self, hidden_states, *more, **kwargs)
        parts = self._split_heads(self.query_key_value(hidden_states))
        query, key, value = (part.transpose(1, 2) for part in parts)  # [B, H | Hkv, S, D]
        query, key = layers.rotate(apply_rotary_pos_emb, query, key, kwargs["position_embeddings"])
        key, value = layers.update_cache(self, key, value, cache, kwargs, kwargs["position_embeddings"])
        # In the new architecture, stock expands the heads before it caches them.
        if self.new_decoder_architecture:
            groups = self.num_heads // self.num_kv_heads
            key, value = key[:, ::groups], value[:, ::groups]
        key, value, seen = layers.visible_keys(self, query, key, value, mask, kwargs)
        output, _ = ops.attention(query, key, value, scale=self.head_dim**-0.5, **seen)
        return self.dense(output.flatten(2)), cache if with_cache else None

    def _refusal(more, kwargs):
        if kwargs.get("alibi") is not None:
            return "ALiBi stays stock"
        return "the call has extra positional arguments" if more else None
