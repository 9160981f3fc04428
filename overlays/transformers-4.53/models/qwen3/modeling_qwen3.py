"""ROCm overlay of transformers.models.qwen3.modeling_qwen3, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen3.modeling_qwen3 import (
        Qwen3Attention,
        Qwen3DecoderLayer,
        Qwen3MLP,
        Qwen3RMSNorm,
        Qwen3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Qwen3RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Qwen3RotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Qwen3MLP, layers.GatedMLP())
    overlay.binds(Qwen3DecoderLayer, layers.PreNormLayer())

    @overlay.replaces(Qwen3Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen3_attention(
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
