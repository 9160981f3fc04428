"""ROCm overlay of transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe, 5.0 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import (
        HunYuanMoEV1Attention,
        HunYuanMoEV1DecoderLayer,
        HunYuanMoEV1Experts,
        HunYuanMoEV1MLP,
        HunYuanMoEV1RMSNorm,
        HunYuanMoEV1RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(HunYuanMoEV1RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(HunYuanMoEV1RotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(HunYuanMoEV1MLP, layers.GatedMLP())
    overlay.binds(HunYuanMoEV1Experts, layers.StackedExperts())
    overlay.binds(HunYuanMoEV1DecoderLayer, layers.PreNormLayer())

    @overlay.replaces(HunYuanMoEV1Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def hunyuan_moe_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        query, key = layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings)
        query, key = self.query_layernorm(query), self.key_layernorm(key)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, output.flatten(2), fused=fused), weights
