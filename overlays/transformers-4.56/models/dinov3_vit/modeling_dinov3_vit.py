"""ROCm overlay of transformers.models.dinov3_vit.modeling_dinov3_vit, 4.56 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.dinov3_vit.modeling_dinov3_vit import (
        DINOv3ViTAttention,
        DINOv3ViTGatedMLP,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(DINOv3ViTGatedMLP, layers.GatedMLP())

    @overlay.replaces(DINOv3ViTAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def dinov3_vit_attention(self, stock, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.dropout):
            return stock(self, hidden_states, attention_mask, position_embeddings, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H, S, D]
        # Only the patches are rotated.
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.flatten(2)), weights
