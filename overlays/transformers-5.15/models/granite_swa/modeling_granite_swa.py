"""ROCm overlay of transformers.models.granite_swa.modeling_granite_swa, 5.15 and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: keep the stock forwards
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.granite_swa.modeling_granite_swa import (
        GraniteSWAAttention,
        GraniteSWAMLP,
        GraniteSWARMSNorm,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(GraniteSWARMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(GraniteSWAMLP, layers.GatedMLP())

    @overlay.replaces(GraniteSWAAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def granite_swa_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, beyond_sdpa=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        if position_embeddings is not None:
            query, key = layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs)
        window = self.sliding_window
        key, value, seen = layers.visible_keys(
            self, query, key, value, attention_mask, kwargs, window=window, sinks=self.sinks
        )
        output, weights = ops.attention(query, key, value, scale=self.scaling, sinks=self.sinks, **seen)
        return self.o_proj(output.flatten(2)), weights
