"""ROCm overlay of transformers.models.t5.modeling_t5, 5.15 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention, T5DenseGatedActDense, T5LayerNorm

    from hf_rocm import layers, ops

    overlay.binds(T5LayerNorm, layers.RMSNorm(eps="variance_epsilon"))

    @overlay.replaces(T5Attention, fuses=("q", "k", "v"))
    def t5_attention(
        self,
        stock,
        hidden_states,
        mask=None,
        key_value_states=None,
        position_bias=None,
        past_key_values=None,
        **kwargs,
    ):
        if layers.fallback_reason(self, mask, kwargs, dropout=self.dropout):
            return stock(self, hidden_states, mask, key_value_states, position_bias, past_key_values, **kwargs)
        seen_before = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        if isinstance(seen_before, torch.Tensor):
            # The cache increments this tensor in place.
            seen_before = seen_before.clone()
        names = ("q", "k", "v")
        query, key, value = layers.encoder_decoder(
            self, hidden_states, key_value_states, past_key_values, kwargs, names, self.key_value_proj_dim
        )
        if position_bias is None:
            shape = (1, self.n_heads, query.shape[2], key.shape[2])
            if self.has_relative_attention_bias:
                position_bias = self.compute_bias(*shape[2:], device=query.device, past_seen_tokens=seen_before)
            else:
                position_bias = torch.zeros(shape, device=query.device, dtype=query.dtype)
        key, value, seen = layers.visible_keys(self, query, key, value, mask, kwargs)
        bias = position_bias[..., : key.shape[2]]
        if mask is not None:
            mask = mask[..., : key.shape[2]]
            minimum = torch.finfo(bias.dtype).min
            bias = bias.masked_fill(~mask, minimum) if mask.dtype == torch.bool else bias + mask
        output, weights = ops.attention(query, key, value, scale=self.scaling, causal=seen["causal"], mask=bias)
        return self.o(output.flatten(2)), position_bias, weights

    gated = layers.GatedMLP(fuses=("wi_0", "wi_1"), activation="act", down="wo")

    @overlay.replaces(T5DenseGatedActDense, fuses=gated.fuses)
    def t5_gated_mlp(self, stock, hidden_states):
        # `wo` may be kept in fp32.
        if layers.dropout_reason(self.dropout) or self.wo.weight.dtype != hidden_states.dtype:
            return stock(self, hidden_states)
        return gated.forward(self, stock, hidden_states)
