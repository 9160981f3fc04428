"""ROCm overlay of transformers.models.smollm3.modeling_smollm3, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.smollm3.modeling_smollm3 import (
        SmolLM3Attention,
        SmolLM3DecoderLayer,
        SmolLM3MLP,
        SmolLM3RMSNorm,
        SmolLM3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(SmolLM3RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(SmolLM3RotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(SmolLM3MLP, layers.GatedMLP())
    overlay.binds(SmolLM3DecoderLayer, layers.PreNormLayer())

    @overlay.replaces(SmolLM3Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def smollm3_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        positions = position_embeddings if self.use_rope else None
        terms = {"scale": self.scaling, "window": self.sliding_window}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, positions, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights
