"""ROCm overlay of transformers.models.mpnet.modeling_mpnet, 4.53 and up.

Stock implements only `eager`. Calls that pass a head mask or request attention weights stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.mpnet.modeling_mpnet import MPNetAttention, MPNetOutput, MPNetSelfAttention

    from hf_rocm import layers, ops

    overlay.binds(MPNetOutput, layers.PostNormOutput())

    # the names of the parameters after the mask, which calls may pass by position
    more_names = ("head_mask",) * layers.before("5.0") + ("position_bias", "output_attentions")

    @overlay.replaces(MPNetSelfAttention, fuses=("q", "k", "v"))
    def mpnet_attention(self, stock, hidden_states, attention_mask=None, *more, **kwargs):
        terms = {**dict(zip(more_names, more, strict=False)), **kwargs}
        bias = terms.pop("position_bias", None)  # [B | 1, H, S, S]
        if layers.fallback_reason(self, attention_mask, terms, dropout=self.dropout):
            return stock(self, hidden_states, attention_mask, *more, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q", "k", "v", head_dim=self.attention_head_size)
        if bias is not None:
            attention_mask = bias if attention_mask is None else bias + attention_mask
        output, _ = ops.attention(query, key, value, scale=self.attention_head_size**-0.5, mask=attention_mask)
        return (self.o(output.flatten(2)),)

    @overlay.replaces(MPNetAttention)
    def mpnet_attention_and_norm(self, stock, hidden_states, attention_mask=None, *more, **kwargs):
        terms = {**dict(zip(more_names, more, strict=False)), **kwargs}
        arguments = [terms.get(name) for name in more_names[:-1]]
        attended = self.attn(
            hidden_states, attention_mask, *arguments, output_attentions=terms.get("output_attentions", False)
        )
        output = layers.norm_of_sum(self.LayerNorm, attended[0], hidden_states, self.dropout)
        return (output, *attended[1:])
