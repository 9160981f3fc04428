"""ROCm overlay of transformers.models.olmo_hybrid.modeling_olmo_hybrid, 5.3 and up.

Served: full attention, the rotary embedding, the MLPs and the norms. The gated delta rule, which is recurrent, stays
stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.olmo_hybrid.modeling_olmo_hybrid import (
        OlmoHybridAttention,
        OlmoHybridMLP,
        OlmoHybridRMSNorm,
        OlmoHybridRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(OlmoHybridRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(OlmoHybridRotaryEmbedding, layers.RotaryEmbedding(wide=True))
    overlay.binds(OlmoHybridMLP, layers.GatedMLP())

    @overlay.replaces(OlmoHybridAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def olmo_hybrid_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, S, heads · D]
        heads = layers.split_heads((self.q_norm(query), self.k_norm(key), value), self.head_dim)
        terms = {"scale": self.scaling}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return self.o_proj(output), weights
