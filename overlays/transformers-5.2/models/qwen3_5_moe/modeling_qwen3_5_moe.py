"""ROCm overlay of transformers.models.qwen3_5_moe.modeling_qwen3_5_moe, 5.2 and up.

Served: full attention, the experts, the MLPs and the norms of the text model, and the vision tower's attention. The
router is served from 5.6 on, and the gated delta rule from 5.16 on.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
        Qwen3_5MoeAttention,
        Qwen3_5MoeExperts,
        Qwen3_5MoeGatedDeltaNet,
        Qwen3_5MoeMLP,
        Qwen3_5MoeRMSNorm,
        Qwen3_5MoeTopKRouter,
        Qwen3_5MoeVisionAttention,
        apply_rotary_pos_emb,
        apply_rotary_pos_emb_vision,
    )

    from hf_rocm import layers

    overlay.binds(Qwen3_5MoeRMSNorm, layers.RMSNorm(eps="eps", one_plus=True))
    overlay.binds(Qwen3_5MoeMLP, layers.GatedMLP())
    overlay.binds(Qwen3_5MoeExperts, layers.StackedExperts())
    # Older routers return probabilities instead of logits.
    if not layers.before("5.6"):
        overlay.binds(Qwen3_5MoeTopKRouter, layers.TopKRouter(normalise=True))

    @overlay.replaces(Qwen3_5MoeAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen3_5_moe_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        gated, key, value = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, S, 2H·D | Hkv·D]
        query, gate = gated.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)  # [B, S, H, D] each
        key, value = layers.split_heads((key, value), self.head_dim)
        heads = query.transpose(1, 2), key, value
        terms = {"scale": self.scaling, "norms": ("q_norm", "k_norm")}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return self.o_proj((output.view_as(gate) * gate.sigmoid()).flatten(2)), weights

    @overlay.replaces(Qwen3_5MoeVisionAttention)
    def qwen3_5_moe_vision_attention(self, stock, hidden_states, cu_seqlens, *more, position_embeddings=None, **kwargs):
        extra_reason = (
            "the call has no position embeddings, or has extra positional arguments"
            if more or position_embeddings is None
            else None
        )
        if layers.fallback_reason(self, None, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason):
            return stock(self, hidden_states, cu_seqlens, *more, position_embeddings=position_embeddings, **kwargs)
        query, key, value = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).unbind(1)  # [T, H, D]
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        output = layers.packed(query, key, value, cu_seqlens, scale=self.scaling)
        return self.proj(output.flatten(1))

    # layers before 5.16 store the functions that they call as attributes, and their states have a different layout
    if not layers.before("5.16"):

        @overlay.replaces(Qwen3_5MoeGatedDeltaNet, fuses=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
        def qwen3_5_moe_delta(self, stock, hidden_states, cache_params=None, attention_mask=None, **kwargs):
            tokens = layers.delta_tokens(self, hidden_states, cache_params, attention_mask, kwargs)
            if tokens is None:
                return stock(self, hidden_states, cache_params, attention_mask, **kwargs)
            joined, gate, beta, decay = layers.project(
                self, tokens.x, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
            )
            query, key, value = joined.split((self.key_dim, self.key_dim, self.value_dim), dim=-1)
            query, key = (part.unflatten(-1, (self.num_k_heads, -1)) for part in (query, key))  # [B, S, G, D_k]
            heads = (self.num_k_heads, -1, self.head_v_dim)
            value, gate = (part.unflatten(-1, heads) for part in (value, gate))  # [B, S, G, R, D_v]
            beta, decay = (part.unflatten(-1, (self.num_k_heads, -1)) for part in (beta, decay))  # [B, S, G, R]
            return self.out_proj(layers.gated_delta(self, (query, key, value, gate, beta, decay), tokens))
