"""ROCm overlay of transformers.models.qwen2_moe.modeling_qwen2_moe, 5.0 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen2_moe.modeling_qwen2_moe import (
        Qwen2MoeAttention,
        Qwen2MoeDecoderLayer,
        Qwen2MoeExperts,
        Qwen2MoeMLP,
        Qwen2MoeRMSNorm,
        Qwen2MoeRotaryEmbedding,
        Qwen2MoeTopKRouter,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Qwen2MoeRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Qwen2MoeRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Qwen2MoeMLP, layers.GatedMLP())
    overlay.binds(Qwen2MoeExperts, layers.StackedExperts())
    # Older routers return probabilities instead of logits.
    if not layers.before("5.6"):
        overlay.binds(Qwen2MoeTopKRouter, layers.TopKRouter(normalise="norm_topk_prob"))
    overlay.binds(Qwen2MoeDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(Qwen2MoeAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen2_moe_attention(
        self,
        stock,
        hidden_states,
        position_embeddings=None,
        attention_mask=None,
        past_key_values=None,
        fused=None,
        **kwargs,
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        terms = {"scale": self.scaling, "window": getattr(self, "sliding_window", None)}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights
