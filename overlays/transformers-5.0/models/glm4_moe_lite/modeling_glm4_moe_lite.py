"""ROCm overlay of transformers.models.glm4_moe_lite.modeling_glm4_moe_lite, 5.0 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import (
        Glm4MoeLiteAttention,
        Glm4MoeLiteDecoderLayer,
        Glm4MoeLiteMLP,
        Glm4MoeLiteRMSNorm,
        Glm4MoeLiteRotaryEmbedding,
        Glm4MoeLiteTopkRouter,
        apply_rotary_pos_emb,
        apply_rotary_pos_emb_interleave,
    )

    from hf_rocm import layers, ops

    overlay.binds(Glm4MoeLiteRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Glm4MoeLiteRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Glm4MoeLiteMLP, layers.GatedMLP())
    overlay.binds_first(
        "transformers.models.glm4_moe_lite.modeling_glm4_moe_lite",
        Glm4MoeLiteExperts=layers.StackedExperts(),
        Glm4MoeLiteNaiveMoe=layers.StackedExperts(),
    )
    overlay.binds(Glm4MoeLiteDecoderLayer, layers.PreNormLayer())
    # Older routers do not return (logits, weights, ids).
    if not layers.before("5.13"):
        overlay.binds(Glm4MoeLiteTopkRouter, layers.GroupedRouter())

    @overlay.replaces(Glm4MoeLiteAttention, fuses=("q_a_proj", "kv_a_proj_with_mqa"))
    def glm4_moe_lite_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)

        def rotate(query, key):
            if self.config.rope_interleave:
                return apply_rotary_pos_emb_interleave(query, key, *position_embeddings)
            return layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings)

        query, key, value = layers.latent_heads(
            self, hidden_states, rotate, past_key_values, kwargs, position_embeddings, fused=fused
        )  # [B, H, S, D | D_v]
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, output.flatten(2), fused=fused), weights
