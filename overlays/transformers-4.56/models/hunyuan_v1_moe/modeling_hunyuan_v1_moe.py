"""ROCm overlay of transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe, 4.56 and 4.57."""

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
        HunYuanMoEV1MLP,
        HunYuanMoEV1Moe,
        HunYuanMoEV1RMSNorm,
        HunYuanMoEV1RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(HunYuanMoEV1RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(HunYuanMoEV1RotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(HunYuanMoEV1MLP, layers.GatedMLP())
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

    @overlay.replaces(HunYuanMoEV1Moe, experts=("gate_proj", "up_proj", "down_proj", "act_fn"))
    def hunyuan_moe_block(self, stock, hidden_states):
        run = layers.listed_experts(self, hidden_states)
        if run is None:
            return stock(self, hidden_states)
        weights, ids = layers.softmax_top(
            self.gate(hidden_states), self.top_k, normalise=True, dtype=hidden_states.dtype
        )
        routed = run(hidden_states.flatten(0, 1), ids, weights).view_as(hidden_states)
        return routed + self.shared_mlp(hidden_states)
