"""ROCm overlay of transformers.models.qwen3.modeling_qwen3, 4.56 to 5.3."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3RMSNorm, apply_rotary_pos_emb

    from hf_rocm import layers, ops

    @overlay.replaces(Qwen3Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen3_attention(
        self,
        stock,
        hidden_states,
        position_embeddings,
        attention_mask,
        past_key_values=None,
        cache_position=None,
        **kwargs,
    ):
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(
                self, hidden_states, position_embeddings, attention_mask, past_key_values, cache_position, **kwargs
            )
        batch, length = hidden_states.shape[:-1]
        heads = (batch, length, -1, self.head_dim)
        query, key, value = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj")
        query = self.q_norm(query.view(heads)).transpose(1, 2)  # [B, H, S, D]
        key = self.k_norm(key.view(heads)).transpose(1, 2)  # [B, Hkv, S, D]
        value = value.view(heads).transpose(1, 2)
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        if past_key_values is not None:
            place = {"sin": sin, "cos": cos, "cache_position": cache_position}
            key, value = past_key_values.update(key, value, self.layer_idx, place)
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.view(batch, length, -1)), weights

    @overlay.replaces(Qwen3MLP, fuses=("gate_proj", "up_proj"))
    def qwen3_mlp(self, stock, x):
        return layers.gated_mlp(self, stock, x)

    @overlay.replaces(Qwen3RMSNorm)
    def qwen3_rms_norm(self, stock, hidden_states):
        return layers.rms_norm(self, stock, hidden_states, eps=self.variance_epsilon)
