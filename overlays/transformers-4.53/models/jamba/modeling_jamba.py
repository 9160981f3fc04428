"""ROCm overlay of transformers.models.jamba.modeling_jamba, 4.53 to 4.57.

Served: attention, the experts, the MLPs and the norms. The state-space layers stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.jamba.modeling_jamba import (
        JambaMLP,
        JambaRMSNorm,
        JambaSdpaAttention,
        JambaSparseMoeBlock,
    )

    from hf_rocm import layers, ops

    overlay.binds(JambaRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(JambaMLP, layers.GatedMLP())

    @overlay.replaces(JambaSdpaAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def jamba_attention(
        self, stock, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, *more, **kwargs
    ):
        extra_reason = "the call has extra positional arguments" if more else None
        if layers.fallback_reason(
            self, attention_mask, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason
        ):
            return stock(self, hidden_states, attention_mask, position_ids, past_key_values, *more, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        key, value = layers.update_cache(self, key, value, past_key_values, {})
        mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
        key, value, seen = layers.visible_keys(self, query, key, value, mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.head_dim**-0.5, **seen)
        return self.o_proj(output.flatten(2)), weights, past_key_values

    @overlay.replaces(JambaSparseMoeBlock, experts=("gate_proj", "up_proj", "down_proj", "act_fn"))
    def jamba_moe_block(self, stock, hidden_states):
        run = layers.listed_experts(self, hidden_states)
        if run is None:
            return stock(self, hidden_states)
        rows = hidden_states.flatten(0, 1)  # [T, H]
        logits = self.router(rows)
        weights, ids = layers.softmax_top(logits, self.top_k, normalise=False, dtype=rows.dtype)
        return run(rows, ids, weights).view_as(hidden_states), logits
