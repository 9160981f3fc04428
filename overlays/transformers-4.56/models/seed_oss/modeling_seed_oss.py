"""ROCm overlay of transformers.models.seed_oss.modeling_seed_oss, 4.56 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from torch.nn.functional import dropout
    from transformers.models.seed_oss.modeling_seed_oss import (
        SeedOssAttention,
        SeedOssDecoderLayer,
        SeedOssMLP,
        SeedOssRMSNorm,
        SeedOssRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(SeedOssRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(SeedOssRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(SeedOssDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(SeedOssAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def seed_oss_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        terms = {"scale": self.scaling}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return dropout(self.o_proj(output), self.residual_dropout, self.training), weights

    gated = layers.GatedMLP()

    @overlay.replaces(SeedOssMLP, fuses=gated.fuses)
    def seed_oss_mlp(self, stock, x, fused=None):
        if self.training and self.residual_dropout:
            return stock(self, x)
        return gated.forward(self, stock, x, fused)
