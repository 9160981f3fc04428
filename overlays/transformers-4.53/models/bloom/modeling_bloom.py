"""ROCm overlay of transformers.models.bloom.modeling_bloom, 4.53 and up.

Served: attention with ALiBi, whose bias is added to the mask. Stock implements only `eager`. LayerNorm, the MLP,
which has no gate, and the sliced GEMM of `slow_but_exact` stay stock, as do calls that pass a head mask or request
attention weights.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add

    from hf_rocm import layers, ops

    with_cache = layers.before("4.54")

    @overlay.replaces(BloomAttention)
    def bloom_attention(self, stock, hidden_states, residual, alibi, attention_mask, *more, **kwargs):
        extra_reason = _refusal(self, more)
        if layers.fallback_reason(
            self, attention_mask, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason
        ):
            return stock(self, hidden_states, residual, alibi, attention_mask, *more, **kwargs)
        (joined,) = layers.split_heads((self.query_key_value(hidden_states),), 3 * self.head_dim)
        query, key, value = joined.chunk(3, dim=-1)  # [B, H, S, D]
        cache = kwargs.get("layer_past")
        key, value = layers.update_cache(self, key, value, cache, kwargs)
        bias = self.beta * alibi.view(query.shape[0], self.num_heads, *alibi.shape[1:])  # [B, H, 1, S_k]
        if attention_mask is not None:
            bias = bias + attention_mask[..., : key.shape[2]]
        output, _ = ops.attention(query, key, value, scale=self.inv_norm_factor, mask=bias)
        output = dropout_add(self.dense(output.flatten(2)), residual, self.hidden_dropout, self.training)
        return (output, cache) if with_cache else (output, None)

    def _refusal(self, more):
        if self.pretraining_tp > 1 and self.slow_but_exact:
            return "the sliced output (slow_but_exact) stays stock"
        return "the call has extra positional arguments" if more else None
