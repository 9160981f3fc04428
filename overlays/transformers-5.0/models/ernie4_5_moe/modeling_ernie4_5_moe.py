"""ROCm overlay of transformers.models.ernie4_5_moe.modeling_ernie4_5_moe, 5.0 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import (
        Ernie4_5_MoeAttention,
        Ernie4_5_MoeDecoderLayer,
        Ernie4_5_MoeExperts,
        Ernie4_5_MoeMLP,
        Ernie4_5_MoeRMSNorm,
        Ernie4_5_MoeRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(Ernie4_5_MoeRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Ernie4_5_MoeRotaryEmbedding, layers.RotaryEmbedding(wide=True))
    overlay.binds(Ernie4_5_MoeMLP, layers.GatedMLP())
    overlay.binds(Ernie4_5_MoeExperts, layers.StackedExperts())
    overlay.binds(Ernie4_5_MoeDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(Ernie4_5_MoeAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def ernie4_5_moe_attention(
        self,
        stock,
        hidden_states,
        position_embeddings=None,
        attention_mask=None,
        past_key_values=None,
        fused=None,
        **kwargs,
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, output.flatten(2), fused=fused), weights
