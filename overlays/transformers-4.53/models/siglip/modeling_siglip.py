"""ROCm overlay of transformers.models.siglip.modeling_siglip, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.siglip.modeling_siglip import SiglipAttention, SiglipEncoderLayer

    from hf_rocm import layers, ops

    overlay.binds(SiglipEncoderLayer, layers.PreNormEncoderLayer())

    @overlay.replaces(SiglipAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def siglip_attention(self, stock, hidden_states, attention_mask=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.dropout):
            return stock(self, hidden_states, attention_mask, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H, S, D]
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, {"is_causal": self.is_causal})
        output, weights = ops.attention(query, key, value, scale=self.scale, **seen)
        return self.out_proj(output.flatten(2)), weights
