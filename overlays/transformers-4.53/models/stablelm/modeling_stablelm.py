"""ROCm overlay of transformers.models.stablelm.modeling_stablelm, 4.53 to 4.57.

The model's LayerNorm stays stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    # the class table selects StableLmSdpaAttention; its base class, StableLmAttention, is imported for its digest
    from transformers.models.stablelm.modeling_stablelm import (
        StableLmAttention,  # noqa: F401
        StableLmMLP,
        StableLmRotaryEmbedding,
        StableLmSdpaAttention,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(StableLmRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(StableLmMLP, layers.GatedMLP())

    @overlay.replaces(StableLmSdpaAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def stablelm_attention(
        self, stock, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.training and self.attention_dropout.p):
            return stock(self, hidden_states, attention_mask, position_ids, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        if self.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        position_embeddings = kwargs["position_embeddings"]
        heads = query, key, value
        terms = {"scale": self.head_dim**-0.5, "partial": True}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.pack_outputs(self.o_proj(output), weights, past_key_values)
