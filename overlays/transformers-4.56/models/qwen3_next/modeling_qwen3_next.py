"""ROCm overlay of transformers.models.qwen3_next.modeling_qwen3_next, 4.57.

Served: the layers with full attention, the experts, the MLPs and the norms. The gated delta rule, which is recurrent,
stays stock.
"""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        Qwen3NextAttention,
        Qwen3NextMLP,
        Qwen3NextRMSNorm,
        Qwen3NextSparseMoeBlock,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(Qwen3NextAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen3_next_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        gated, key, value = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, S, heads · D]
        query, gate = gated.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)  # [B, S, H, D] each
        key, value = layers.split_heads((key, value), self.head_dim)
        query = self.q_norm(query).transpose(1, 2)
        key = self.k_norm(key.transpose(1, 2)).transpose(1, 2)
        query, key, value = layers.rotate_and_remember(
            self, apply_rotary_pos_emb, query, key, value, position_embeddings, past_key_values, kwargs
        )
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.flatten(2) * gate.flatten(2).sigmoid()), weights

    @overlay.replaces(Qwen3NextSparseMoeBlock, experts=("gate_proj", "up_proj", "down_proj", "act_fn"))
    def qwen3_next_mixture(self, stock, hidden_states):
        run = layers.listed_experts(self, hidden_states)
        if run is None:
            return stock(self, hidden_states)
        rows = hidden_states.flatten(0, 1)  # [T, H]
        router_logits = self.gate(rows)
        weights, ids = layers.softmax_top(router_logits, self.top_k, normalise=self.norm_topk_prob, dtype=rows.dtype)
        shared = self.shared_expert_gate(rows).sigmoid() * self.shared_expert(rows)
        return (run(rows, ids, weights) + shared).view_as(hidden_states), router_logits

    @overlay.replaces(Qwen3NextMLP, fuses=("gate_proj", "up_proj"))
    def qwen3_next_mlp(self, stock, x):
        return layers.gated_mlp(self, stock, x)

    @overlay.replaces(Qwen3NextRMSNorm)
    def qwen3_next_rms_norm(self, stock, x):
        return layers.rms_norm(self, stock, x, eps=self.eps, one_plus=True)
