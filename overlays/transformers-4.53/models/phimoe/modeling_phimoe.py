"""ROCm overlay of transformers.models.phimoe.modeling_phimoe, 4.53 to 4.57."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.phimoe.modeling_phimoe import (
        PhimoeBlockSparseTop2MLP,  # noqa: F401 - imported for its digest
        PhimoeSdpaAttention,
        PhimoeSparseMoeBlock,
        apply_rotary_pos_emb,
        sparsemixer,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(PhimoeSdpaAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def phimoe_attention(
        self, stock, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, attention_mask, position_ids, past_key_values, **kwargs)
        position_embeddings = kwargs["position_embeddings"]
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings, position_ids)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.head_dim**-0.5, **seen)
        return layers.pack_outputs(self.o_proj(output.flatten(2)), weights, past_key_values)

    @overlay.replaces(PhimoeSparseMoeBlock, experts=("w1", "w3", "w2", "act_fn"))
    def phimoe_block(self, stock, hidden_states):
        jitter = "jitter in training stays stock" if self.training and self.input_jitter_noise > 0 else None
        run = layers.listed_experts(self, hidden_states, extra_reason=jitter)
        if run is None:
            return stock(self, hidden_states)
        rows = hidden_states.flatten(0, 1)  # [T, H]
        router_logits = self.gate(rows)
        weights, ids = sparsemixer(router_logits, self.router_jitter_noise, self.training)
        return run(rows, ids, weights).view_as(hidden_states), router_logits
