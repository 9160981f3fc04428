"""ROCm overlay of transformers.models.deit.modeling_deit, 5.9 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.deit.modeling_deit import DeiTAttention, DeiTLayer

    from hf_rocm import layers, ops

    @overlay.replaces(DeiTAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def deit_attention(self, stock, hidden_states, attention_mask=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, attention_mask, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H, S, D]
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.flatten(2)), weights

    @overlay.replaces(DeiTLayer)
    def deit_layer(self, stock, hidden_states, attention_mask=None, **kwargs):
        output, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        normed, total = layers.norm_and_sum(self.layernorm_after, output, hidden_states, self.dropout)
        return self.dropout(self.mlp(normed)) + total
