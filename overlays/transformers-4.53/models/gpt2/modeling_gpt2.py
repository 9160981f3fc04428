"""ROCm overlay of transformers.models.gpt2.modeling_gpt2, 4.53 and up.

Served: self-attention. Cross-attention stays stock, as do the MLP, which has no gate, and LayerNorm.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    from hf_rocm import layers, ops

    @overlay.replaces(GPT2Attention)
    def gpt2_attention(self, stock, hidden_states, past_key_values=None, *more, **kwargs):
        mask, extra_reason = kwargs.get("attention_mask"), _refusal(more, kwargs)
        if layers.fallback_reason(
            self, mask, kwargs, dropout=self.training and self.attn_dropout.p, extra_reason=extra_reason
        ):
            return stock(self, hidden_states, past_key_values, *more, **kwargs)
        parts = self.c_attn(hidden_states).split(self.split_size, dim=2)
        query, key, value = layers.split_heads(parts, self.head_dim)  # [B, H, S, D]
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        key, value = layers.update_cache(self, key, value, cache, kwargs)
        key, value, seen = layers.visible_keys(self, query, key, value, mask, kwargs)
        # up to 5.3, stock's SDPA attention uses this scale for every config
        output, _ = ops.attention(query, key, value, scale=getattr(self, "scaling", self.head_dim**-0.5), **seen)
        return self.resid_dropout(self.c_proj(output.flatten(2))), None

    def _refusal(more, kwargs):
        if kwargs.get("encoder_hidden_states") is not None:
            return "cross-attention stays stock"
        return "the call has extra positional arguments" if more else None
