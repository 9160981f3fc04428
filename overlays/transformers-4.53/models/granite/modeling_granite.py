"""ROCm overlay of transformers.models.granite.modeling_granite, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.granite.modeling_granite import (
        GraniteAttention,
        GraniteMLP,
        GraniteRMSNorm,
        GraniteRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(GraniteRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(GraniteRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(GraniteMLP, layers.GatedMLP())

    @overlay.replaces(GraniteAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def granite_attention(
        self, stock, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        terms = {"scale": self.scaling}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output), weights
