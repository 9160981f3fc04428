"""ROCm overlay of transformers.models.idefics3.modeling_idefics3, 4.53 and up.

Served: the vision tower's attention. The overlay for the language model's type serves the language model.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionAttention

    from hf_rocm import layers, ops

    @overlay.replaces(Idefics3VisionAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def idefics3_vision_attention(self, stock, hidden_states, attention_mask=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.dropout):
            return stock(self, hidden_states, attention_mask, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H, S, D]
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, {"is_causal": self.is_causal})
        output, weights = ops.attention(query, key, value, scale=self.scale, **seen)
        return self.out_proj(output.flatten(2)), weights
