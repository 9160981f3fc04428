"""ROCm overlay of transformers.models.qwen2.modeling_qwen2, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen2.modeling_qwen2 import (
        Qwen2Attention,
        Qwen2DecoderLayer,
        Qwen2MLP,
        Qwen2RMSNorm,
        Qwen2RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Qwen2RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Qwen2RotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Qwen2MLP, layers.GatedMLP())
    overlay.binds(Qwen2DecoderLayer, layers.PreNormLayer())

    @overlay.replaces(Qwen2Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen2_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        terms = {"scale": self.scaling, "window": self.sliding_window}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights
