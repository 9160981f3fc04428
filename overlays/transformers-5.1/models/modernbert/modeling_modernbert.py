"""ROCm overlay of transformers.models.modernbert.modeling_modernbert, 5.1 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.modernbert.modeling_modernbert import (
        ModernBertAttention,
        ModernBertEncoderLayer,
        ModernBertMLP,
        ModernBertRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(ModernBertRotaryEmbedding, layers.RotaryEmbedding())

    @overlay.replaces(ModernBertAttention)
    def modernbert_attention(self, stock, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, **kwargs)
        qkv = self.Wqkv(hidden_states).unflatten(-1, (3, -1, self.head_dim))  # [B, S, 3, H, D]
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(dim=-3))  # [B, H, S, D]
        query, key = layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.head_dim**-0.5, **seen)
        return self.out_drop(self.Wo(output.flatten(2))), weights

    @overlay.replaces(ModernBertMLP)
    def modernbert_mlp(self, stock, hidden_states):
        # `Wi` joins gate and up in one matrix.
        return self.Wo(self.drop(layers.activated(self.Wi(hidden_states), self.act)))

    @overlay.replaces(ModernBertEncoderLayer)
    def modernbert_layer(self, stock, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
        terms = {"position_embeddings": position_embeddings, "attention_mask": attention_mask, **kwargs}
        output, _ = self.attn(self.attn_norm(hidden_states), **terms)
        normed, total = layers.norm_and_sum(self.mlp_norm, output, hidden_states)
        return total + self.mlp(normed)
