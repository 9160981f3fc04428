"""ROCm overlay of transformers.models.idefics2.modeling_idefics2, 4.53 and up.

Served: the vision tower's attention, and the connector (the projection and the resampler). The overlay for the language
model's type serves the language model.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    import torch
    from transformers.models.idefics2.modeling_idefics2 import (
        Idefics2MLP,
        Idefics2PerceiverAttention,
        Idefics2RMSNorm,
        Idefics2VisionAttention,
    )

    from hf_rocm import layers, ops

    overlay.binds(Idefics2RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Idefics2MLP, layers.GatedMLP())

    @overlay.replaces(Idefics2VisionAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def idefics2_vision_attention(self, stock, hidden_states, attention_mask=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.dropout):
            return stock(self, hidden_states, attention_mask, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H, S, D]
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, {"is_causal": self.is_causal})
        output, weights = ops.attention(query, key, value, scale=self.scale, **seen)
        return self.out_proj(output.flatten(2)), weights

    @overlay.replaces(Idefics2PerceiverAttention, fuses=("k_proj", "v_proj"))
    def idefics2_perceiver_attention(self, stock, latents, context, attention_mask=None, *more, **kwargs):
        requested = any(value is not None and value is not False for value in (*more, kwargs.get("past_key_values")))
        extra_reason = "calls that request a cache or attention weights stay stock" if requested else None
        if layers.fallback_reason(
            self, attention_mask, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason
        ):
            return stock(self, latents, context, attention_mask, *more, **kwargs)
        source = torch.cat((context, latents), dim=1)  # [B, S_k, K]
        (query,) = layers.split_heads((self.q_proj(latents),), self.head_dim)  # [B, H, S, D]
        key, value = layers.heads(self, source, "k_proj", "v_proj")  # [B, Hkv, S_k, D]
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, {"is_causal": self.is_causal})
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.pack_outputs(self.o_proj(output.flatten(2)), weights, None)
