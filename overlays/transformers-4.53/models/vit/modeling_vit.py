"""ROCm overlay of transformers.models.vit.modeling_vit, 4.53 to 5.8."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.vit.modeling_vit import ViTLayer, ViTSelfAttention

    from hf_rocm import layers, ops

    # before 4.56, attention and layers return tuples, with the attention weights only on request; from 4.56 on,
    # attention returns a pair, and layers return a tensor
    old_outputs = layers.before("4.56")

    @overlay.replaces(ViTSelfAttention, fuses=("query", "key", "value"))
    def vit_attention(self, stock, hidden_states, *more, **kwargs):
        requested = any(value is not None and value is not False for value in more)
        extra_reason = "calls that pass a head mask or request attention weights stay stock" if requested else None
        if layers.fallback_reason(self, None, kwargs, dropout=self.dropout_prob, extra_reason=extra_reason):
            return stock(self, hidden_states, *more, **kwargs)
        names = ("query", "key", "value")
        query, key, value = layers.heads(self, hidden_states, *names, head_dim=self.attention_head_size)  # [B, H, S, D]
        key, value, seen = layers.visible_keys(self, query, key, value, None, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return (output.flatten(2),) if old_outputs else (output.flatten(2), weights)

    @overlay.replaces(ViTLayer)
    def vit_layer(self, stock, hidden_states, *args, **kwargs):
        attended = self.attention(self.layernorm_before(hidden_states), *args, **kwargs)
        output = attended[0] if old_outputs else attended
        normed, total = layers.norm_and_sum(self.layernorm_after, output, hidden_states)
        output = self.output(self.intermediate(normed), total)
        return (output, *attended[1:]) if old_outputs else output
