"""ROCm overlay of transformers.models.distilbert.modeling_distilbert, 4.53 to 4.57.

The attention of layers with pruned heads stays stock, as do calls with a head mask, requested attention weights, or
different inputs for queries, keys and values.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    # the class table selects DistilBertSdpaAttention; its base class is imported for its digest
    from transformers.models.distilbert.modeling_distilbert import (  # noqa: F401
        DistilBertSdpaAttention,
        MultiHeadSelfAttention,
        TransformerBlock,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(DistilBertSdpaAttention, fuses=("q_lin", "k_lin", "v_lin"))
    def distilbert_attention(self, stock, query, key, value, mask, *more, **kwargs):
        extra_reason = _refusal(self, query, key, value, more)
        if layers.fallback_reason(self, mask, kwargs, dropout=self.dropout_prob, extra_reason=extra_reason):
            return stock(self, query, key, value, mask, *more, **kwargs)
        names = ("q_lin", "k_lin", "v_lin")
        query, key, value = layers.heads(self, query, *names, head_dim=self.attention_head_size)  # [B, H, S, D]
        key, value, seen = layers.visible_keys(self, query, key, value, mask, kwargs)
        output, _ = ops.attention(query, key, value, scale=self.attention_head_size**-0.5, **seen)
        return (self.out_lin(output.flatten(2)),)

    def _refusal(self, query, key, value, more):
        if query is not key or key is not value:
            return "calls with different inputs for queries, keys and values stay stock"
        if self.pruned_heads or any(value is not None and value is not False for value in more):
            return "layers with pruned heads, and calls with a head mask or requested attention weights, stay stock"
        return None

    @overlay.replaces(TransformerBlock)
    def distilbert_block(self, stock, x, attn_mask=None, head_mask=None, output_attentions=False):
        if output_attentions:
            return stock(self, x, attn_mask, head_mask, output_attentions)
        terms = {"mask": attn_mask, "head_mask": head_mask, "output_attentions": output_attentions}
        attended = self.attention(query=x, key=x, value=x, **terms)[0]
        attended = layers.norm_of_sum(self.sa_layer_norm, attended, x)
        return (layers.norm_of_sum(self.output_layer_norm, self.ffn(attended), attended),)
