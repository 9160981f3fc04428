"""ROCm overlay of transformers.models.olmo3.modeling_olmo3, 4.57 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.olmo3.modeling_olmo3 import (
        Olmo3Attention,
        Olmo3MLP,
        Olmo3RMSNorm,
        Olmo3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Olmo3RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    # From 5.0 to 5.12, cos and sin have the dtype of the hidden states.
    overlay.binds(Olmo3RotaryEmbedding, layers.RotaryEmbedding(wide=layers.before("5.0") or not layers.before("5.13")))
    overlay.binds(Olmo3MLP, layers.GatedMLP())

    @overlay.replaces(Olmo3Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def olmo3_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, S, heads · D]
        heads = layers.split_heads((self.q_norm(query), self.k_norm(key), value), self.head_dim)
        terms = {"scale": self.scaling, "window": self.sliding_window}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return self.o_proj(output), weights
