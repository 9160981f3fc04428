"""ROCm overlay of transformers.models.phi.modeling_phi, 4.53 and up.

The model's MLP, which has no gate, and its LayerNorm stay stock.
"""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: keep the stock forwards
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.phi.modeling_phi import PhiAttention, apply_rotary_pos_emb

    from hf_rocm import layers, ops

    @overlay.replaces(PhiAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def phi_attention(self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        names, norms = ("q_proj", "k_proj", "v_proj"), ("q_layernorm", "k_layernorm")
        query, key, value = layers.heads(self, hidden_states, *names, norms=norms)  # [B, H | Hkv, S, D]
        query, key = layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings, partial=True)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.dense(output.flatten(2)), weights
