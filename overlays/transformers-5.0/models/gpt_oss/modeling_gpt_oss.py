"""ROCm overlay of transformers.models.gpt_oss.modeling_gpt_oss, 5.0 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.gpt_oss.modeling_gpt_oss import (
        GptOssAttention,
        GptOssDecoderLayer,
        GptOssExperts,
        GptOssMLP,
        GptOssRMSNorm,
        GptOssRotaryEmbedding,
        GptOssTopKRouter,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(GptOssRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(GptOssRotaryEmbedding, layers.RotaryEmbedding(layout="once"))
    overlay.binds(GptOssTopKRouter, layers.TopKRouter(chosen_only=True))
    overlay.binds(
        GptOssExperts,
        layers.StackedExperts(
            activation="clamped_swiglu", limit="limit", alpha="alpha", transposed=True, interleaved=True
        ),
    )
    overlay.binds(GptOssMLP, layers.SparseMoE(router="router"))
    overlay.binds(GptOssDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(GptOssAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def gpt_oss_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(
            self, attention_mask, kwargs, dropout=self.attention_dropout, beyond_sdpa=True, pages=True
        ):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        terms = {"scale": self.scaling, "once": True, "window": self.sliding_window, "sinks": self.sinks}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights
