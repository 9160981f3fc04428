"""ROCm overlay of transformers.models.m2m_100.modeling_m2m_100, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100Attention

    from hf_rocm import layers, ops

    @overlay.replaces(M2M100Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def m2m_100_attention(
        self, stock, hidden_states, key_value_states=None, past_key_values=None, attention_mask=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.dropout):
            return stock(self, hidden_states, key_value_states, past_key_values, attention_mask, **kwargs)
        query, key, value = layers.encoder_decoder(self, hidden_states, key_value_states, past_key_values, kwargs)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)  # [B, S, H, D]
        return layers.pack_outputs(self.out_proj(output.flatten(2)), weights, past_key_values)
