"""ROCm overlay of transformers.models.nemotron.modeling_nemotron, 5.13 and up.

The model's MLP, which has no gate, and its LayerNorm stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.nemotron.modeling_nemotron import (
        NemotronAttention,
        NemotronRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(NemotronRotaryEmbedding, layers.RotaryEmbedding())

    @overlay.replaces(NemotronAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def nemotron_attention(
        self, stock, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        terms = {"scale": self.scaling}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return self.o_proj(output), weights
