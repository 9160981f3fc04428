"""ROCm overlay of transformers.models.phi.modeling_phi, 4.53 and up.

The model's MLP, which has no gate, and its LayerNorm stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.phi.modeling_phi import PhiAttention, PhiRotaryEmbedding, apply_rotary_pos_emb

    from hf_rocm import layers

    overlay.binds(PhiRotaryEmbedding, layers.RotaryEmbedding())

    @overlay.replaces(PhiAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def phi_attention(self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        names, norms = ("q_proj", "k_proj", "v_proj"), ("q_layernorm", "k_layernorm")
        heads = layers.heads(self, hidden_states, *names, norms=norms)  # [B, H | Hkv, S, D]
        terms = {"scale": self.scaling, "partial": True}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return self.dense(output), weights
