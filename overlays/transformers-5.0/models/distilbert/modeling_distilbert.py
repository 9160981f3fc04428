"""ROCm overlay of transformers.models.distilbert.modeling_distilbert, 5.0 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.distilbert.modeling_distilbert import DistilBertSelfAttention, TransformerBlock

    from hf_rocm import layers, ops

    @overlay.replaces(DistilBertSelfAttention, fuses=("q_lin", "k_lin", "v_lin"))
    def distilbert_attention(self, stock, hidden_states, attention_mask=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.training and self.dropout.p):
            return stock(self, hidden_states, attention_mask, **kwargs)
        names = ("q_lin", "k_lin", "v_lin")
        query, key, value = layers.heads(self, hidden_states, *names, head_dim=self.attention_head_size)  # [B, H, S, D]
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.out_lin(output.flatten(2)), weights

    @overlay.replaces(TransformerBlock)
    def distilbert_block(self, stock, hidden_states, attention_mask=None, **kwargs):
        attended, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
        attended = layers.norm_of_sum(self.sa_layer_norm, attended, hidden_states)
        return layers.norm_of_sum(self.output_layer_norm, self.ffn(attended), attended)
