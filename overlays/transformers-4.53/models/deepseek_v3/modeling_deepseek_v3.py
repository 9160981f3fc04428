"""ROCm overlay of transformers.models.deepseek_v3.modeling_deepseek_v3, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Attention,
        DeepseekV3DecoderLayer,
        DeepseekV3MLP,
        DeepseekV3RMSNorm,
        DeepseekV3RotaryEmbedding,
        DeepseekV3TopkRouter,
        apply_rotary_pos_emb,
        apply_rotary_pos_emb_interleave,
    )

    from hf_rocm import layers, ops

    overlay.binds(DeepseekV3RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(DeepseekV3RotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(DeepseekV3MLP, layers.GatedMLP())
    overlay.binds_first(
        "transformers.models.deepseek_v3.modeling_deepseek_v3",
        DeepseekV3Experts=layers.StackedExperts(),
        DeepseekV3NaiveMoe=layers.StackedExperts(),
        DeepseekV3MoE=layers.GatedMoE(),
    )
    overlay.binds(DeepseekV3DecoderLayer, layers.PreNormLayer())
    # Older routers do not return (logits, weights, ids).
    if not layers.before("5.13"):
        overlay.binds(DeepseekV3TopkRouter, layers.GroupedRouter())

    @overlay.replaces(DeepseekV3Attention, fuses=("q_a_proj", "kv_a_proj_with_mqa"))
    def deepseek_v3_attention(
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
