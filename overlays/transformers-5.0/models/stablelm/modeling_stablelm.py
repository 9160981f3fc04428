"""ROCm overlay of transformers.models.stablelm.modeling_stablelm, 5.0 and up.

The model's LayerNorm stays stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.stablelm.modeling_stablelm import (
        StableLmAttention,
        StableLmMLP,
        StableLmRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(StableLmRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(StableLmMLP, layers.GatedMLP())

    @overlay.replaces(StableLmAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def stablelm_attention(
        self, stock, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, attention_mask, position_ids, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        if self.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        position_embeddings = kwargs["position_embeddings"]
        heads = query, key, value
        terms = {"scale": self.scaling, "partial": True}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return self.o_proj(output), weights
