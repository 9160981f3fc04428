"""ROCm overlay of transformers.models.gpt_bigcode.modeling_gpt_bigcode, 4.54 and up.

Served: self-attention with one key head, or with as many key heads as query heads. Cross-attention, the MLP (which has
no gate) and LayerNorm stay stock. In 4.53, the cache is one tensor of keys and values, and the whole model stays stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeAttention

    from hf_rocm import layers, ops

    @overlay.replaces(GPTBigCodeAttention)
    def gpt_bigcode_attention(self, stock, hidden_states, *more, **kwargs):
        mask, extra_reason = kwargs.get("attention_mask"), _refusal(self, more)
        if layers.fallback_reason(self, mask, kwargs, dropout=self.attn_pdrop, extra_reason=extra_reason):
            return stock(self, hidden_states, *more, **kwargs)
        joined = self.c_attn(hidden_states)
        if self.multi_query:
            parts = joined.split((self.embed_dim, self.kv_dim, self.kv_dim), dim=-1)
            query, key, value = layers.split_heads(parts, self.head_dim)  # [B, H | 1, S, D]
        else:
            (joined,) = layers.split_heads((joined,), 3 * self.head_dim)
            query, key, value = joined.chunk(3, dim=-1)  # [B, H, S, D]
        cache = kwargs.get("layer_past")
        key, value = layers.update_cache(self, key, value, getattr(cache, "self_attention_cache", cache), kwargs)
        key, value, seen = layers.visible_keys(self, query, key, value, mask, kwargs)
        output, _ = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.resid_dropout(self.c_proj(output.flatten(2))), None

    def _refusal(self, more):
        if self.is_cross_attention:
            return "cross-attention stays stock"
        return "the call has extra positional arguments" if more else None
