"""ROCm overlay of transformers.models.apertus.modeling_apertus, 4.56 and up.

The model's MLP has no gate and stays stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.apertus.modeling_apertus import (
        ApertusAttention,
        ApertusDecoderLayer,
        ApertusRMSNorm,
        ApertusRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(ApertusRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(ApertusRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(ApertusDecoderLayer, layers.PreNormLayer(norms=("attention_layernorm", "feedforward_layernorm")))

    @overlay.replaces(ApertusAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def apertus_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        names, norms = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
        heads = layers.heads(self, hidden_states, *names, fused=fused)
        terms = {"scale": self.scaling, "norms": norms}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights
