"""ROCm overlay of transformers.models.zamba2.modeling_zamba2, 4.53 and up.

Served: the shared attention layers, the rotary embedding, the layers' MLPs and the norms. The state-space layers stay
stock, and q, k and v are not fused where several layers share them.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.zamba2.modeling_zamba2 import (
        Zamba2Attention,
        Zamba2MLP,
        Zamba2RMSNorm,
        Zamba2RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(Zamba2RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Zamba2RotaryEmbedding, layers.RotaryEmbedding())

    @overlay.replaces(Zamba2Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def zamba2_attention(
        self,
        stock,
        hidden_states,
        layer_idx,
        attention_mask=None,
        past_key_values=None,
        position_embeddings=None,
        **kwargs,
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, layer_idx, attention_mask, past_key_values, position_embeddings, **kwargs)
        parts = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, S, heads · D]
        if self.config.use_shared_attention_adapter:
            adapter_lists = (self.linear_q_adapter_list, self.linear_k_adapter_list, self.linear_v_adapter_list)
            index = self.layer_dic[layer_idx]
            parts = tuple(
                part + adapters[index](hidden_states) for part, adapters in zip(parts, adapter_lists, strict=True)
            )
        query, key, value = layers.split_heads(parts, self.head_dim)  # [B, H | Hkv, S, D]
        if self.config.use_mem_rope:
            query, key = layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings)
        if past_key_values is not None:
            # Several layers share one module, so the caller's index is used.
            key, value = past_key_values.update(key, value, layer_idx)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.flatten(2)), weights

    @overlay.replaces(Zamba2MLP)
    def zamba2_mlp(self, stock, hidden_state, layer_idx=None):
        adapter = self.gate_up_proj_adapter_list[self.layer_dic[layer_idx]]
        joined = self.gate_up_proj(hidden_state) + adapter(hidden_state)  # [B, S, gate | up]
        return self.down_proj(layers.activated(joined, self.act_fn))
