"""ROCm overlay of transformers.models.mt5.modeling_mt5, 4.53 to 5.14."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    import torch
    from transformers.models.mt5.modeling_mt5 import MT5Attention, MT5DenseGatedActDense, MT5LayerNorm

    from hf_rocm import layers, ops

    overlay.binds(MT5LayerNorm, layers.RMSNorm(eps="variance_epsilon"))

    with_cache, by_cache_position = layers.before("4.54"), layers.before("5.4")

    @overlay.replaces(MT5Attention, fuses=("q", "k", "v"))
    def mt5_attention(
        self,
        stock,
        hidden_states,
        mask=None,
        key_value_states=None,
        position_bias=None,
        past_key_values=None,
        *more,
        **kwargs,
    ):
        extra_reason = (
            "layers with pruned heads, and calls with extra positional arguments, stay stock"
            if more or getattr(self, "pruned_heads", None)
            else None
        )
        if layers.fallback_reason(self, mask, kwargs, dropout=self.dropout, extra_reason=extra_reason):
            return stock(self, hidden_states, mask, key_value_states, position_bias, past_key_values, *more, **kwargs)
        seen_before = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        names = ("q", "k", "v")
        query, key, value = layers.encoder_decoder(
            self, hidden_states, key_value_states, past_key_values, kwargs, names, self.key_value_proj_dim
        )
        if position_bias is None:
            position_bias = _position_bias(self, query, key, seen_before, kwargs)
            if mask is not None:
                position_bias = position_bias + mask[..., : key.shape[2]]
        output, _ = ops.attention(query, key, value, scale=1.0, mask=position_bias)  # [B, S, H, D]
        outputs = (self.o(output.flatten(2)), position_bias)
        return (outputs[0], past_key_values, position_bias) if with_cache else outputs

    def _position_bias(self, query, key, seen_before, kwargs):
        s_q, s_k = query.shape[2], key.shape[2]
        if not self.has_relative_attention_bias:
            return torch.zeros((1, query.shape[1], s_q, s_k), device=query.device, dtype=query.dtype)
        if not by_cache_position:
            return self.compute_bias(s_q, s_k, device=query.device, past_seen_tokens=seen_before)
        cache_position = kwargs.get("cache_position")
        length = kwargs.get("query_length")
        length = (s_q if cache_position is None else cache_position[-1] + 1) if length is None else length
        return self.compute_bias(length, s_k, device=query.device, cache_position=cache_position)[:, :, -s_q:]

    gated = layers.GatedMLP(fuses=("wi_0", "wi_1"), activation="act", down="wo")

    @overlay.replaces(MT5DenseGatedActDense, fuses=gated.fuses)
    def mt5_gated_mlp(self, stock, hidden_states):
        # `wo` may be kept in fp32.
        if layers.dropout_reason(self.dropout) or self.wo.weight.dtype != hidden_states.dtype:
            return stock(self, hidden_states)
        return gated.forward(self, stock, hidden_states)
