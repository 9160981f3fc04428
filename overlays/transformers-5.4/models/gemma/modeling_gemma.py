"""ROCm overlay of transformers.models.gemma.modeling_gemma, 5.4 and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.gemma.modeling_gemma import GemmaAttention, GemmaMLP, GemmaRMSNorm, apply_rotary_pos_emb

    from hf_rocm import layers, ops

    @overlay.replaces(GemmaAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def gemma_attention(
        self, stock, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        batch, length = hidden_states.shape[:-1]
        heads = (batch, length, -1, self.head_dim)
        query, key, value = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj")
        query, key, value = (part.view(heads).transpose(1, 2) for part in (query, key, value))  # [B, H | Hkv, S, D]
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.view(batch, length, -1)), weights

    @overlay.replaces(GemmaMLP, fuses=("gate_proj", "up_proj"))
    def gemma_mlp(self, stock, x):
        return layers.gated_mlp(self, stock, x)

    @overlay.replaces(GemmaRMSNorm)
    def gemma_rms_norm(self, stock, x):
        return layers.rms_norm(self, stock, x, eps=self.eps, one_plus=True)
