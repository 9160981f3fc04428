"""ROCm overlay of transformers.models.glm4_moe.modeling_glm4_moe, 4.54 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.glm4_moe.modeling_glm4_moe import (
        Glm4MoeAttention,
        Glm4MoeDecoderLayer,
        Glm4MoeMLP,
        Glm4MoeRMSNorm,
        Glm4MoeRotaryEmbedding,
        Glm4MoeTopkRouter,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Glm4MoeRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Glm4MoeRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Glm4MoeMLP, layers.GatedMLP())
    overlay.binds_first(
        "transformers.models.glm4_moe.modeling_glm4_moe",
        Glm4MoeExperts=layers.StackedExperts(),
        Glm4MoeNaiveMoe=layers.StackedExperts(),
        Glm4MoeMoE=layers.GatedMoE(),
    )
    overlay.binds(Glm4MoeDecoderLayer, layers.PreNormLayer())
    # Older routers do not return (logits, weights, ids).
    if not layers.before("5.13"):
        overlay.binds(Glm4MoeTopkRouter, layers.GroupedRouter())

    @overlay.replaces(Glm4MoeAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def glm4_moe_attention(
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
