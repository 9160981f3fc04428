"""ROCm overlay of transformers.models.deepseek_v2.modeling_deepseek_v2, 4.54 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
        DeepseekV2Attention,
        DeepseekV2DecoderLayer,
        DeepseekV2MLP,
        DeepseekV2RMSNorm,
        apply_rotary_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(DeepseekV2RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(DeepseekV2MLP, layers.GatedMLP())
    overlay.binds_first(
        "transformers.models.deepseek_v2.modeling_deepseek_v2",
        DeepseekV2Experts=layers.StackedExperts(),
        DeepseekV2MoE=layers.GatedMoE(),
    )
    overlay.binds(DeepseekV2DecoderLayer, layers.PreNormLayer())

    @overlay.replaces(DeepseekV2Attention, fuses=("q_a_proj", "kv_a_proj_with_mqa"))
    def deepseek_v2_attention(
        self, stock, hidden_states, attention_mask=None, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, attention_mask, past_key_values, **kwargs)

        def rotate(query, key):
            return apply_rotary_emb(query, key, kwargs["position_embeddings"].to(query.device))

        query, key, value = layers.latent_heads(
            self, hidden_states, rotate, past_key_values, kwargs, fused=fused
        )  # [B, H, S, D | D_v]
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, output.flatten(2), fused=fused), weights
