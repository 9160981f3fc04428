"""ROCm overlay of transformers.models.dinov2_with_registers.modeling_dinov2_with_registers, 4.53 to 5.17."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
        Dinov2WithRegistersSelfAttention,
        Dinov2WithRegistersSwiGLUFFN,
    )

    from hf_rocm import layers, ops

    alone = layers.before("4.56")  # since then the second value is the attention weights, requested or not

    @overlay.replaces(Dinov2WithRegistersSwiGLUFFN)
    def dinov2_with_registers_mlp(self, stock, hidden_state):
        return self.weights_out(ops.act_and_mul(self.weights_in(hidden_state), activation="silu"))

    @overlay.replaces(Dinov2WithRegistersSelfAttention, fuses=("query", "key", "value"))
    def dinov2_with_registers_attention(self, stock, hidden_states, *more, **kwargs):
        requested = any(value is not None and value is not False for value in more)
        extra_reason = "a head mask or attention weights are requested, which stay stock" if requested else None
        if layers.fallback_reason(self, None, kwargs, dropout=self.dropout_prob, extra_reason=extra_reason):
            return stock(self, hidden_states, *more, **kwargs)
        names = ("query", "key", "value")
        query, key, value = layers.heads(self, hidden_states, *names, head_dim=self.attention_head_size)  # [B, H, S, D]
        key, value, seen = layers.visible_keys(self, query, key, value, None, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return (output.flatten(2),) if alone else (output.flatten(2), weights)
