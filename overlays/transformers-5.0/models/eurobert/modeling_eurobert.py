"""ROCm overlay of transformers.models.eurobert.modeling_eurobert, 5.3 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.eurobert.modeling_eurobert import (
        EuroBertAttention,
        EuroBertMLP,
        EuroBertRMSNorm,
        EuroBertRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(EuroBertRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(EuroBertRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(EuroBertMLP, layers.GatedMLP())

    @overlay.replaces(EuroBertAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def eurobert_attention(
        self, stock, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        terms = {"scale": self.scaling}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return self.o_proj(output), weights
