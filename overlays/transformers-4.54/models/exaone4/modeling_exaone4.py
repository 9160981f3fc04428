"""ROCm overlay of transformers.models.exaone4.modeling_exaone4, 4.54 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.exaone4.modeling_exaone4 import (
        Exaone4Attention,
        Exaone4MLP,
        Exaone4RMSNorm,
        Exaone4RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Exaone4RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Exaone4RotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Exaone4MLP, layers.GatedMLP())

    @overlay.replaces(Exaone4Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def exaone4_attention(
        self, stock, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        names = ("q_proj", "k_proj", "v_proj")
        heads = layers.heads(self, hidden_states, *names)  # [B, H | Hkv, S, D]
        positions = position_embeddings if self.sliding_window is None or self.is_sliding else None
        terms = {
            "scale": self.scaling,
            "norms": ("q_norm", "k_norm"),
            "window": self.sliding_window if self.is_sliding else None,
        }
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, positions, past_key_values, attention_mask, kwargs, **terms
        )
        return self.o_proj(output), weights
