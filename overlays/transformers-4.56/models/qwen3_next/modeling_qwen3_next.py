"""ROCm overlay of transformers.models.qwen3_next.modeling_qwen3_next, 4.57 and up.

Served: the layers with full attention, the rotary embedding, the experts, the MLPs and the norms; from 5.16 on, also
the layers with the gated delta rule.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        Qwen3NextAttention,
        Qwen3NextGatedDeltaNet,
        Qwen3NextMLP,
        Qwen3NextRMSNorm,
        Qwen3NextRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Qwen3NextRMSNorm, layers.RMSNorm(eps="eps", one_plus=True))
    overlay.binds(Qwen3NextRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Qwen3NextMLP, layers.GatedMLP())
    overlay.binds_first(
        "transformers.models.qwen3_next.modeling_qwen3_next",
        Qwen3NextExperts=layers.StackedExperts(),
        Qwen3NextSparseMoeBlock=layers.SoftmaxMoE(
            normalise="norm_topk_prob", shared=("shared_expert", "shared_expert_gate")
        ),
    )

    @overlay.replaces(Qwen3NextAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen3_next_attention(
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

    # layers before 5.16 store the functions that they call as attributes, and their states have a different layout
    if not layers.before("5.16"):

        @overlay.replaces(Qwen3NextGatedDeltaNet, fuses=("in_proj_qkvz", "in_proj_ba"))
        def qwen3_next_delta(self, stock, hidden_states, cache_params=None, attention_mask=None, **kwargs):
            tokens = layers.delta_tokens(self, hidden_states, cache_params, attention_mask, kwargs)
            if tokens is None:
                return stock(self, hidden_states, cache_params, attention_mask, **kwargs)
            joined, logits = layers.project(self, tokens.x, "in_proj_qkvz", "in_proj_ba")  # [B, S, G · …]
            # R, the number of value heads per key head.
            shared = self.num_v_heads // self.num_k_heads
            sizes = (self.head_k_dim,) * 2 + (shared * self.head_v_dim,) * 2
            query, key, *values = joined.unflatten(-1, (self.num_k_heads, -1)).split(sizes, dim=-1)
            value, gate = (part.unflatten(-1, (shared, -1)) for part in values)  # [B, S, G, R, D_v]
            beta, decay = logits.unflatten(-1, (self.num_k_heads, -1)).chunk(2, dim=-1)  # [B, S, G, R]
            return self.out_proj(layers.gated_delta(self, (query, key, value, gate, beta, decay), tokens))
