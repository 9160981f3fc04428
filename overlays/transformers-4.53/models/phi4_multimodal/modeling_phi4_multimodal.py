"""ROCm overlay of transformers.models.phi4_multimodal.modeling_phi4_multimodal, 4.53 and up.

Served: the text model. The audio and vision parts stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.phi4_multimodal.modeling_phi4_multimodal import (
        Phi4MultimodalAttention,
        Phi4MultimodalMLP,
        Phi4MultimodalRMSNorm,
        Phi4MultimodalRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Phi4MultimodalRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Phi4MultimodalRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Phi4MultimodalMLP, layers.JoinedMLP())

    @overlay.replaces(Phi4MultimodalAttention)
    def phi4_multimodal_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        count = [self.config.num_attention_heads, self.num_key_value_heads, self.num_key_value_heads]
        (joined,) = layers.split_heads((self.qkv_proj(hidden_states),), self.head_dim)
        heads = joined.split(count, dim=1)  # [B, H | Hkv, S, D]
        terms = {"scale": self.scaling, "window": getattr(self.config, "sliding_window", None)}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return self.o_proj(output), weights
