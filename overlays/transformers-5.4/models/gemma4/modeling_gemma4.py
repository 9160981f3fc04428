"""ROCm overlay of transformers.models.gemma4.modeling_gemma4, 5.5 and up.

Served: attention, the MLPs and the rotary embedding module of the text model, and all RMS norms with a weight. The
experts and the rest of the audio and vision parts stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.gemma4.modeling_gemma4 import (
        Gemma4RMSNorm,
        Gemma4TextAttention,
        Gemma4TextMLP,
        Gemma4TextRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(Gemma4TextRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Gemma4TextMLP, layers.GatedMLP())

    @overlay.replaces(Gemma4TextAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def gemma4_attention(self, stock, hidden_states, position_embeddings, attention_mask, *more, **kwargs):
        extra_reason = "the call has extra positional arguments" if more else None
        if layers.fallback_reason(
            self, attention_mask, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason
        ):
            return stock(self, hidden_states, position_embeddings, attention_mask, *more, **kwargs)
        shared, cache = kwargs["shared_kv_states"], kwargs.get("past_key_values")
        if self.is_kv_shared_layer:
            (query,) = layers.split_heads((self.q_proj(hidden_states),), self.head_dim)
            key, value = shared[getattr(self, "kv_shared_layer_index", self.layer_type)]
        else:
            names = ("q_proj", "k_proj") if self.v_proj is None else ("q_proj", "k_proj", "v_proj")
            query, key, *rest = layers.heads(self, hidden_states, *names)  # [B, H | Hkv, S, D]
            value = self.v_norm(rest[0] if rest else key)
            key = apply_rotary_pos_emb(self.k_norm(key), *position_embeddings)
            key, value = layers.update_cache(self, key, value, cache, kwargs, position_embeddings)
        query = apply_rotary_pos_emb(self.q_norm(query), *position_embeddings)
        if self.store_full_length_kv:
            shared[self.layer_idx if hasattr(self, "kv_shared_layer_index") else self.layer_type] = key, value
        window = self.sliding_window
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs, window=window)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.flatten(2)), weights

    norm = layers.RMSNorm(eps="eps")

    @overlay.replaces(Gemma4RMSNorm)
    def gemma4_rms_norm(self, stock, hidden_states):
        if not self.with_scale:
            return stock(self, hidden_states)
        return norm.forward(self, stock, hidden_states)
