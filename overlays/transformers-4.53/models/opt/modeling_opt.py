"""ROCm overlay of transformers.models.opt.modeling_opt, 4.53 and up.

The model's feed-forward layers, which have no gate, and its LayerNorm stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.opt.modeling_opt import OPTAttention

    from hf_rocm import layers, ops

    with_cache = layers.before("4.54")

    @overlay.replaces(OPTAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def opt_attention(self, stock, hidden_states, past_key_values=None, attention_mask=None, *more, **kwargs):
        extra_reason = "the call has extra positional arguments" if more else None
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.dropout, extra_reason=extra_reason):
            return stock(self, hidden_states, past_key_values, attention_mask, *more, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H, S, D]
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        output = self.out_proj(output.flatten(2))
        return (output, weights, past_key_values) if with_cache else (output, weights)
