"""ROCm overlay of transformers.models.llama4.modeling_llama4, 4.56 and up.

Served: the text model. The vision tower stays stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    import torch
    from transformers.models.llama4.modeling_llama4 import (
        Llama4TextAttention,
        Llama4TextExperts,  # noqa: F401 - imported for its digest
        Llama4TextMLP,
        Llama4TextMoe,
        Llama4TextRMSNorm,
        apply_rotary_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(Llama4TextRMSNorm, layers.RMSNorm(eps="eps"))
    overlay.binds(Llama4TextMLP, layers.GatedMLP(activation="activation_fn"))

    @overlay.replaces(Llama4TextAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def llama4_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if self.use_rope:
            query, key = apply_rotary_emb(query, key, position_embeddings.to(query.device))
        if hasattr(self, "qk_norm"):
            query, key = self.qk_norm(query), self.qk_norm(key)
        if self.attn_temperature_tuning and not self.use_rope:
            query = _by_temperature(self, query, past_key_values, kwargs.get("cache_position"))
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.flatten(2)), weights

    def _by_temperature(self, query, cache, positions):
        """Scale a query by position. query: [B, S, H, D].

        positions: [S], or None (5.4 and up) for those after the cached tokens.
        """
        if positions is None:
            start = 0 if cache is None else cache.get_seq_length(self.layer_idx)
            positions = torch.arange(query.shape[1], device=query.device) + start
        steps = torch.floor((positions.float() + 1.0) / self.floor_scale)
        scales = torch.log1p(steps) * self.attn_scale + 1.0
        return (query * scales[:, None, None]).to(query.dtype)

    @overlay.replaces(Llama4TextMoe)
    def llama4_moe_block(self, stock, hidden_states):
        rows = hidden_states.reshape(-1, self.hidden_dim)  # [T, H]
        run = layers.given_experts(
            self,
            rows,
            gate_up="experts.gate_up_proj",
            down="experts.down_proj",
            act_fn="experts.act_fn",
            extra_reason=None if layers.untouched(self.experts) else "the experts have hooks",
            transposed=True,
            weigh_input=True,
        )
        if run is None:
            return stock(self, hidden_states)
        router_scores, router_logits = self.router(rows)
        # the router sets the scores of all experts that it did not select to 0
        weights, ids = (part[:, : self.top_k] for part in router_scores.sort(descending=True))
        return self.shared_expert(rows) + run(rows, ids, weights), router_logits
