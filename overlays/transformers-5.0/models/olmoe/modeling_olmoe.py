"""ROCm overlay of transformers.models.olmoe.modeling_olmoe, 5.0 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.olmoe.modeling_olmoe import (
        OlmoeAttention,
        OlmoeDecoderLayer,
        OlmoeExperts,
        OlmoeRMSNorm,
        OlmoeRotaryEmbedding,
        OlmoeSparseMoeBlock,
        OlmoeTopKRouter,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(OlmoeRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(OlmoeRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(OlmoeExperts, layers.StackedExperts())
    overlay.binds(OlmoeSparseMoeBlock, layers.SparseMoE())
    # Older routers return probabilities instead of logits.
    if not layers.before("5.6"):
        overlay.binds(OlmoeTopKRouter, layers.TopKRouter(normalise="norm_topk_prob"))
    overlay.binds(OlmoeDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(OlmoeAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def olmoe_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        parts, limit = (self.q_norm(query), self.k_norm(key), value), self.config.clip_qkv
        if limit is not None:
            parts = tuple(part.clamp(-limit, limit) for part in parts)
        heads = layers.split_heads(parts, self.head_dim)  # [B, H | Hkv, S, D]
        terms = {"scale": self.scaling, "window": getattr(self.config, "sliding_window", None)}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights
