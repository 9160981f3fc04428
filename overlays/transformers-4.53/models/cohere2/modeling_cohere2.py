"""ROCm overlay of transformers.models.cohere2.modeling_cohere2, 4.53 and up.

The model's LayerNorm stays stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.cohere2.modeling_cohere2 import (
        Cohere2Attention,
        Cohere2MLP,
        Cohere2RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(Cohere2RotaryEmbedding, layers.RotaryEmbedding(layout="pairs"))
    overlay.binds(Cohere2MLP, layers.GatedMLP())

    @overlay.replaces(Cohere2Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def cohere2_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        if self.sliding_window is not None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.visible_keys(
            self, query, key, value, attention_mask, kwargs, window=self.sliding_window
        )
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.flatten(2)), weights
