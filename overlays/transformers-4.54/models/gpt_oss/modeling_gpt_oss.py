"""ROCm overlay of transformers.models.gpt_oss.modeling_gpt_oss, 4.55 to 4.57."""

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
        GptOssRMSNorm,
        GptOssRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(GptOssRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(GptOssRotaryEmbedding, layers.RotaryEmbedding(layout="once"))
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

    @overlay.replaces(GptOssExperts)
    def gpt_oss_experts(self, stock, hidden_states, router_indices=None, routing_weights=None):
        terms = {"activation": "clamped_swiglu", "limit": self.limit, "alpha": self.alpha}
        run = layers.given_experts(self, hidden_states, transposed=True, interleaved=True, **terms)
        if run is None:
            return stock(self, hidden_states, router_indices, routing_weights)
        rows = hidden_states.flatten(0, -2)  # [T, H]
        # routing_weights: [T, E]
        weights = routing_weights.gather(1, router_indices)
        return run(rows, router_indices, weights).view(len(hidden_states), -1, rows.shape[1])
