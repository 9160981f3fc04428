"""ROCm overlay of transformers.models.seed_oss.modeling_seed_oss, 4.56 and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from torch.nn.functional import dropout
    from transformers.models.seed_oss.modeling_seed_oss import (
        SeedOssAttention,
        SeedOssDecoderLayer,
        SeedOssMLP,
        SeedOssRMSNorm,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(SeedOssDecoderLayer)
    def seed_oss_decoder_layer(self, stock, hidden_states, *args, **kwargs):
        return layers.decoder_layer(self, stock, hidden_states, args, kwargs)

    @overlay.replaces(SeedOssAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def seed_oss_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        query, key, value = layers.rotate_and_remember(
            self, apply_rotary_pos_emb, query, key, value, position_embeddings, past_key_values, kwargs
        )
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return dropout(self.o_proj(output.flatten(2)), self.residual_dropout, self.training), weights

    @overlay.replaces(SeedOssMLP, fuses=("gate_proj", "up_proj"))
    def seed_oss_mlp(self, stock, x):
        if self.training and self.residual_dropout:
            return stock(self, x)
        return layers.gated_mlp(self, stock, x)

    @overlay.replaces(SeedOssRMSNorm)
    def seed_oss_rms_norm(self, stock, hidden_states):
        return layers.rms_norm(self, stock, hidden_states, eps=self.variance_epsilon)
