"""ROCm overlay of transformers.models.gemma3.modeling_gemma3, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.gemma3.modeling_gemma3 import (
        Gemma3Attention,
        Gemma3DecoderLayer,
        Gemma3MLP,
        Gemma3RMSNorm,
        Gemma3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Gemma3RMSNorm, layers.RMSNorm(eps="eps", one_plus=True))
    overlay.binds(Gemma3RotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Gemma3MLP, layers.GatedMLP())
    overlay.binds(
        Gemma3DecoderLayer,
        layers.PreNormLayer(
            norms=("input_layernorm", "pre_feedforward_layernorm"),
            post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        ),
    )

    @overlay.replaces(Gemma3Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def gemma3_attention(
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
        names, norms = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
        heads = layers.heads(self, hidden_states, *names, fused=fused)
        terms = {"scale": self.scaling, "norms": norms, "window": self.sliding_window}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights
