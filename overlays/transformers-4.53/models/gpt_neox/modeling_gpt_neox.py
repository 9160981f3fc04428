"""ROCm overlay of transformers.models.gpt_neox.modeling_gpt_neox, 4.53 and up.

The model's MLP, which has no gate, and its LayerNorm stay stock.
"""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: keep the stock forwards
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, apply_rotary_pos_emb

    from hf_rocm import layers, ops

    @overlay.replaces(GPTNeoXAttention)
    def gpt_neox_attention(self, stock, hidden_states, attention_mask, *more, **kwargs):
        extra_reason = "calls with positional arguments stay stock" if more else None
        if layers.fallback_reason(
            self, attention_mask, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason
        ):
            return stock(self, hidden_states, attention_mask, *more, **kwargs)
        (joined,) = layers.split_heads((self.query_key_value(hidden_states),), 3 * self.head_size)
        query, key, value = joined.chunk(3, dim=-1)  # [B, H, S, D]
        position_embeddings = kwargs["position_embeddings"]
        query, key = layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings)
        key, value = layers.update_cache(self, key, value, kwargs.get("layer_past"), kwargs, position_embeddings)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.dense(output.flatten(2)), weights
