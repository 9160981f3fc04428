"""ROCm overlay of transformers.models.bert.modeling_bert, 4.54 to 4.57.

Served: both residual sums with their LayerNorms, and self-attention of an encoder, or of a decoder without a cache.
The attention of models with relative positions stays stock, as do calls with cross-attention, a cache, a head mask or
requested attention weights.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    # the class table selects BertSdpaSelfAttention; its base class, BertSelfAttention, is imported for its digest
    from transformers.models.bert.modeling_bert import (  # noqa: F401
        BertOutput,
        BertSdpaSelfAttention,
        BertSelfAttention,
        BertSelfOutput,
    )

    from hf_rocm import layers, ops

    overlay.binds(BertSelfOutput, layers.PostNormOutput())
    overlay.binds(BertOutput, layers.PostNormOutput())

    @overlay.replaces(BertSdpaSelfAttention, fuses=("query", "key", "value"))
    def bert_attention(self, stock, hidden_states, attention_mask=None, *more, **kwargs):
        if layers.fallback_reason(
            self, attention_mask, kwargs, dropout=self.dropout_prob, extra_reason=_refusal(self, more, kwargs)
        ):
            return stock(self, hidden_states, attention_mask, *more, **kwargs)
        names = ("query", "key", "value")
        query, key, value = layers.heads(self, hidden_states, *names, head_dim=self.attention_head_size)  # [B, H, S, D]
        causal = {"is_causal": self.is_decoder}
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, causal)
        output, _ = ops.attention(query, key, value, scale=self.attention_head_size**-0.5, **seen)
        return output.flatten(2), None

    def _refusal(self, more, kwargs):
        if self.position_embedding_type != "absolute":
            return f"position embeddings of type {self.position_embedding_type!r} stay stock"
        given = [name for name, value in kwargs.items() if value is not None and value is not False]
        unserved = [name for name in given if name != "cache_position"]
        if unserved or any(value is not None and value is not False for value in more):
            return f"calls with {' and '.join(unserved) or 'extra positional arguments'} stay stock"
        return None
