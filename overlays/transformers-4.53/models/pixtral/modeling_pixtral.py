"""ROCm overlay of transformers.models.pixtral.modeling_pixtral, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.pixtral.modeling_pixtral import (
        PixtralAttention,
        PixtralMLP,
        PixtralRMSNorm,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(PixtralRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(PixtralMLP, layers.GatedMLP())

    @overlay.replaces(PixtralAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def pixtral_attention(self, stock, hidden_states, attention_mask=None, position_embeddings=None, *more, **kwargs):
        extra_reason = "the call has extra positional arguments" if more else None
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.dropout, extra_reason=extra_reason):
            return stock(self, hidden_states, attention_mask, position_embeddings, *more, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H, S, D]
        cos, sin = position_embeddings  # [S, D], for all patches of the batch
        query, key = layers.rotate(apply_rotary_pos_emb, query, key, (cos[None], sin[None]))
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.flatten(2)), weights
