"""ROCm overlay of transformers.models.mistral.modeling_mistral, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.mistral.modeling_mistral import (
        MistralAttention,
        MistralDecoderLayer,
        MistralMLP,
        MistralRMSNorm,
        MistralRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(MistralRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(MistralRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(MistralMLP, layers.GatedMLP())
    overlay.binds(MistralDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(MistralAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def mistral_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        terms = {"scale": self.scaling, "window": getattr(self.config, "sliding_window", None)}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights
