"""ROCm overlay of transformers.models.qwen3_5.modeling_qwen3_5, 5.2 and up.

Served: the full-attention layers, MLPs and norms of the text model. Linear attention and the vision part stay stock.
"""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        Qwen3_5Attention,
        Qwen3_5MLP,
        Qwen3_5RMSNorm,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(Qwen3_5RMSNorm, layers.RMSNorm(eps="eps", one_plus=True))
    overlay.binds(Qwen3_5MLP, layers.GatedMLP())

    @overlay.replaces(Qwen3_5Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen3_5_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        joined, key, value = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj")
        query, gate = joined.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)  # [B, S, H, D]
        query = self.q_norm(query).transpose(1, 2)
        key, value = layers.split_heads((key, value), self.head_dim)  # [B, Hkv, S, D]
        query, key = layers.rotate(apply_rotary_pos_emb, query, self.k_norm(key), position_embeddings)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj((output * gate.sigmoid()).flatten(2)), weights
