"""ROCm overlay of transformers.models.ernie.modeling_ernie, 5.0 and up.

Served: both residual sums with their LayerNorms, and self-attention, with and without a cache. Cross-attention stays
stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.ernie.modeling_ernie import ErnieOutput, ErnieSelfAttention, ErnieSelfOutput

    from hf_rocm import layers, ops

    overlay.binds(ErnieSelfOutput, layers.PostNormOutput())
    overlay.binds(ErnieOutput, layers.PostNormOutput())

    @overlay.replaces(ErnieSelfAttention, fuses=("query", "key", "value"))
    def ernie_attention(self, stock, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.training and self.dropout.p):
            return stock(self, hidden_states, attention_mask, past_key_values, **kwargs)
        names = ("query", "key", "value")
        query, key, value = layers.heads(self, hidden_states, *names, head_dim=self.attention_head_size)  # [B, H, S, D]
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        key, value = layers.update_cache(self, key, value, cache, kwargs)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return output.flatten(2), weights
