"""ROCm overlay of transformers.models.bitnet.modeling_bitnet, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.bitnet.modeling_bitnet import (
        BitNetAttention,
        BitNetDecoderLayer,
        BitNetMLP,
        BitNetRMSNorm,
        BitNetRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(BitNetRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(BitNetRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(BitNetDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(BitNetAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def bitnet_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        terms = {"scale": self.scaling}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return self.o_proj(self.attn_sub_norm(output)), weights

    @overlay.replaces(BitNetMLP, fuses=("gate_proj", "up_proj"))
    def bitnet_mlp(self, stock, x, fused=None):
        gate, up = layers.project(self, x, "gate_proj", "up_proj", fused=fused)
        return self.down_proj(self.ffn_sub_norm(self.act_fn(gate) * up))
