"""ROCm overlay of transformers.models.olmoe.modeling_olmoe, 4.53 to 4.57."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.olmoe.modeling_olmoe import (
        OlmoeMLP,  # noqa: F401 - imported for its digest
        OlmoeRMSNorm,
        OlmoeRotaryEmbedding,
        OlmoeSdpaAttention,
        OlmoeSparseMoeBlock,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(OlmoeRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(OlmoeRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(OlmoeSparseMoeBlock, layers.SoftmaxMoE(normalise="norm_topk_prob"))

    @overlay.replaces(OlmoeSdpaAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def olmoe_attention(
        self, stock, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, attention_mask, position_ids, past_key_values, **kwargs)
        position_embeddings = kwargs["position_embeddings"]
        query, key, value = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, S, heads · D]
        parts, limit = (self.q_norm(query), self.k_norm(key), value), self.config.clip_qkv
        if limit is not None:
            parts = tuple(part.clamp(-limit, limit) for part in parts)
        heads = layers.split_heads(parts, self.head_dim)  # [B, H | Hkv, S, D]
        terms = {"scale": self.head_dim**-0.5}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.pack_outputs(self.o_proj(output), weights, past_key_values)
