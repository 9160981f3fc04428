"""ROCm overlay of transformers.models.minimax.modeling_minimax, 4.53 to 4.57.

Served: the layers with full attention, the rotary embedding, the experts and the norms. Lightning attention, which is
linear, stays stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.minimax.modeling_minimax import (
        MiniMaxAttention,
        MiniMaxBlockSparseTop2MLP,  # noqa: F401 - imported for its digest
        MiniMaxRMSNorm,
        MiniMaxRotaryEmbedding,
        MiniMaxSparseMoeBlock,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(MiniMaxRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(MiniMaxRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(MiniMaxSparseMoeBlock, layers.SoftmaxMoE(experts=("w1", "w3", "w2", "act_fn"), jitter="jitter_noise"))

    @overlay.replaces(MiniMaxAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def minimax_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        terms = {"scale": self.scaling, "window": getattr(self.config, "sliding_window", None)}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return self.o_proj(output), weights
