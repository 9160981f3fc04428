"""ROCm overlay of transformers.models.xlm_roberta.modeling_xlm_roberta, 4.53 to 4.57.

Served: both residual sums with their LayerNorms, and self-attention of an encoder or, from 4.54 on, of a decoder
without a cache. The attention of models with relative positions stays stock, as do calls with cross-attention, a cache,
a head mask or requested attention weights.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    # the class table selects XLMRobertaSdpaSelfAttention; its base class is imported for its digest
    from transformers.models.xlm_roberta.modeling_xlm_roberta import (  # noqa: F401
        XLMRobertaOutput,
        XLMRobertaSdpaSelfAttention,
        XLMRobertaSelfAttention,
        XLMRobertaSelfOutput,
    )

    from hf_rocm import layers, ops

    overlay.binds(XLMRobertaSelfOutput, layers.PostNormOutput())
    overlay.binds(XLMRobertaOutput, layers.PostNormOutput())

    # Before 4.54, attention returns (output,), not (output, None), and a decoder's cache is a tuple.
    old_outputs = layers.before("4.54")

    @overlay.replaces(XLMRobertaSdpaSelfAttention, fuses=("query", "key", "value"))
    def xlm_roberta_attention(self, stock, hidden_states, attention_mask=None, *more, **kwargs):
        extra_reason = _refusal(self, more, kwargs)
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.dropout_prob, extra_reason=extra_reason):
            return stock(self, hidden_states, attention_mask, *more, **kwargs)
        names = ("query", "key", "value")
        query, key, value = layers.heads(self, hidden_states, *names, head_dim=self.attention_head_size)  # [B, H, S, D]
        causal = {"is_causal": self.is_decoder}
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, causal)
        output, _ = ops.attention(query, key, value, scale=self.attention_head_size**-0.5, **seen)
        return (output.flatten(2),) if old_outputs else (output.flatten(2), None)

    def _refusal(self, more, kwargs):
        if self.position_embedding_type != "absolute":
            return f"position embeddings of type {self.position_embedding_type!r} stay stock"
        if old_outputs and self.is_decoder:
            return "decoders, which return their cache as a tuple in this release, stay stock"
        given = [name for name, value in kwargs.items() if value is not None and value is not False]
        unserved = [name for name in given if name != "cache_position"]
        if unserved or any(value is not None and value is not False for value in more):
            return f"calls with {' and '.join(unserved) or 'extra positional arguments'} stay stock"
        return None
