"""ROCm overlay of transformers.models.persimmon.modeling_persimmon, 4.53 and up.

The model's MLP, which has no gate, and its LayerNorm stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.persimmon.modeling_persimmon import (
        PersimmonAttention,
        PersimmonRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(PersimmonRotaryEmbedding, layers.RotaryEmbedding())

    with_cache = layers.before("4.54")

    @overlay.replaces(PersimmonAttention)
    def persimmon_attention(
        self, stock, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, *more, **kwargs
    ):
        dropout, extra_reason = (
            self.config.attention_dropout,
            "the call has extra positional arguments" if more else None,
        )
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=dropout, extra_reason=extra_reason):
            return stock(self, hidden_states, attention_mask, position_ids, past_key_values, *more, **kwargs)
        (joined,) = layers.split_heads((self.query_key_value(hidden_states),), 3 * self.head_dim)
        query, key, value = joined.chunk(3, dim=-1)  # [B, H, S, D]
        if self.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        position_embeddings = kwargs["position_embeddings"]
        heads = query, key, value
        terms = {"scale": self.scaling, "partial": True}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        output = self.dense(output)
        return (output, weights, past_key_values) if with_cache else (output, weights)
