"""ROCm overlay of transformers.models.dinov2_with_registers.modeling_dinov2_with_registers, 5.18 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
        Dinov2WithRegistersAttention,
        Dinov2WithRegistersLayer,
        Dinov2WithRegistersSwiGLUFFN,
    )

    from hf_rocm import layers, ops

    overlay.binds(Dinov2WithRegistersSwiGLUFFN, layers.GatedMLP())

    @overlay.replaces(Dinov2WithRegistersAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def dinov2_with_registers_attention(self, stock, hidden_states, attention_mask=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, attention_mask, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H, S, D]
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.flatten(2)), weights

    @overlay.replaces(Dinov2WithRegistersLayer)
    def dinov2_with_registers_layer(self, stock, hidden_states, attention_mask=None, **kwargs):
        output, _ = self.attention(self.norm1(hidden_states), attention_mask=attention_mask, **kwargs)
        output = self.drop_path(self.layer_scale1(output))
        normed, total = layers.norm_and_sum(self.norm2, output, hidden_states)
        return self.drop_path(self.layer_scale2(self.mlp(normed))) + total
