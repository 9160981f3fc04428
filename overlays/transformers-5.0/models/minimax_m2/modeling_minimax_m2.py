"""ROCm overlay of transformers.models.minimax_m2.modeling_minimax_m2, 5.0 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.minimax_m2.modeling_minimax_m2 import (
        MiniMaxM2Attention,
        MiniMaxM2DecoderLayer,
        MiniMaxM2Experts,
        MiniMaxM2RMSNorm,
        MiniMaxM2RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(MiniMaxM2RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(MiniMaxM2RotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(MiniMaxM2Experts, layers.StackedExperts())
    overlay.binds(MiniMaxM2DecoderLayer, layers.PreNormLayer())

    @overlay.replaces(MiniMaxM2Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def minimax_m2_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        parts = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)  # [B, S, heads · D]
        heads = layers.split_heads((self.q_norm(parts[0]), self.k_norm(parts[1]), parts[2]), self.head_dim)
        terms = {"scale": self.scaling}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights
