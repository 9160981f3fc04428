"""ROCm overlay of transformers.models.gemma3n.modeling_gemma3n, 4.53 and up.

Served: attention, the rotary embedding and the MLPs of the text model, and the norms of all parts. Up to 4.55, layers
that reuse another layer's keys and values read them from the cache, and their attention stays stock. Everything else
stays stock, as do norms without a weight. In training, all norms stay stock, because hf_rocm's gradients are rounded
more coarsely.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.gemma3n.modeling_gemma3n import (
        Gemma3nRMSNorm,
        Gemma3nTextAttention,
        Gemma3nTextMLP,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds_first(
        "transformers.models.gemma3n.modeling_gemma3n",
        Gemma3nRotaryEmbedding=layers.RotaryEmbedding(),
        Gemma3nTextRotaryEmbedding=layers.RotaryEmbedding(),
    )

    keys_in_cache = layers.before("4.56")

    @overlay.replaces(Gemma3nTextAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def gemma3n_attention(
        self, stock, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        reads_cache = self.is_kv_shared_layer and keys_in_cache
        extra_reason = (
            "layers that reuse another layer's keys stay stock before transformers 4.56" if reads_cache else None
        )
        if layers.fallback_reason(
            self, attention_mask, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason
        ):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        shared = _shared(past_key_values, kwargs)
        if self.is_kv_shared_layer and shared is not None:
            (query,) = layers.split_heads((self.q_proj(hidden_states),), self.config.head_dim)
            key, value = shared[_shared_key(self, "kv_shared_layer_index")]
        else:
            query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
            key, value = apply_rotary_pos_emb(self.k_norm(key), *position_embeddings), self.v_norm(value)
            if not self.is_kv_shared_layer:
                key, value = layers.update_cache(self, key, value, past_key_values, kwargs, position_embeddings)
        query = apply_rotary_pos_emb(self.q_norm(query), *position_embeddings)
        if shared is not None and self.store_full_length_kv:
            shared[_shared_key(self, "layer_idx")] = key, value
        window = self.sliding_window
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs, window=window)
        output, weights = ops.attention(query, key, value, scale=getattr(self, "scaling", 1.0), **seen)
        return self.o_proj(output.flatten(2)), weights

    def _shared(cache, kwargs):
        """Return the dict in which layers store keys and values for later layers, or None.

        From 5.6 on, it is an argument; from 4.56 to 5.5, an attribute of the cache; without a cache, there is none.
        """
        shared = kwargs.get("shared_kv_states")
        if shared is not None or cache is None or keys_in_cache:
            return shared
        if not hasattr(cache, "shared_layers"):
            cache.shared_layers = {}
        return cache.shared_layers

    def _shared_key(self, attribute):
        return getattr(self, attribute) if hasattr(self, "kv_shared_layer_index") else self.layer_type

    gated = layers.GatedMLP()

    @overlay.replaces(Gemma3nTextMLP, fuses=gated.fuses)
    def gemma3n_mlp(self, stock, hidden_states):
        if self.activation_sparsity <= 0.0:
            return gated.forward(self, stock, hidden_states)
        gate, up = layers.project(self, hidden_states, "gate_proj", "up_proj")
        return self.down_proj(self.act_fn(self._gaussian_topk(gate)) * up)

    norm = layers.RMSNorm(eps="eps")

    @overlay.replaces(Gemma3nRMSNorm)
    def gemma3n_rms_norm(self, stock, hidden_states):
        if not self.with_scale or self.training:
            return stock(self, hidden_states)
        return norm.forward(self, stock, hidden_states)
