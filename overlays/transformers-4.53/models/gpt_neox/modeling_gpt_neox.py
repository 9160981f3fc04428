"""ROCm overlay of transformers.models.gpt_neox.modeling_gpt_neox, 4.53 and up.

The model's MLP, which has no gate, and its LayerNorm stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.gpt_neox.modeling_gpt_neox import (
        GPTNeoXAttention,
        GPTNeoXRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(GPTNeoXRotaryEmbedding, layers.RotaryEmbedding())

    @overlay.replaces(GPTNeoXAttention)
    def gpt_neox_attention(self, stock, hidden_states, attention_mask, *more, **kwargs):
        extra_reason = "the call has extra positional arguments" if more else None
        if layers.fallback_reason(
            self, attention_mask, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason
        ):
            return stock(self, hidden_states, attention_mask, *more, **kwargs)
        (joined,) = layers.split_heads((self.query_key_value(hidden_states),), 3 * self.head_size)
        query, key, value = joined.chunk(3, dim=-1)  # [B, H, S, D]
        position_embeddings, cache = kwargs["position_embeddings"], kwargs.get("layer_past")
        heads, terms = (query, key, value), {"scale": self.scaling}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, cache, attention_mask, kwargs, **terms
        )
        return self.dense(output), weights
