"""ROCm overlay of transformers.models.olmo.modeling_olmo, 4.53 and up.

The model's LayerNorm stays stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.olmo.modeling_olmo import (
        OlmoAttention,
        OlmoDecoderLayer,
        OlmoMLP,
        OlmoRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(OlmoRotaryEmbedding, layers.RotaryEmbedding(wide=True))
    overlay.binds(OlmoMLP, layers.GatedMLP())
    overlay.binds(OlmoDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(OlmoAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def olmo_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        parts = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)  # [B, S, heads · D]
        limit = self.config.clip_qkv
        if limit is not None:
            parts = tuple(part.clamp(-limit, limit) for part in parts)
        heads = layers.split_heads(parts, self.head_dim)
        terms = {"scale": self.scaling}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights
