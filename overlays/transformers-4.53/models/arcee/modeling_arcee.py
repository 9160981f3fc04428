"""ROCm overlay of transformers.models.arcee.modeling_arcee, 4.53 and up.

The model's MLP has no gate and stays stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.arcee.modeling_arcee import (
        ArceeAttention,
        ArceeDecoderLayer,
        ArceeRMSNorm,
        ArceeRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(ArceeRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(ArceeRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(ArceeDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(ArceeAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def arcee_attention(
        self,
        stock,
        hidden_states,
        position_embeddings=None,
        attention_mask=None,
        past_key_values=None,
        fused=None,
        **kwargs,
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        terms = {"scale": self.scaling}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights
