"""ROCm overlay of transformers.models.arcee.modeling_arcee, 4.53 and up.

The model's MLP has no gate and stays stock.
"""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: keep the stock forwards
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.arcee.modeling_arcee import (
        ArceeAttention,
        ArceeDecoderLayer,
        ArceeRMSNorm,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(ArceeRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(ArceeDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(ArceeAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def arcee_attention(
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
        query, key, value = layers.rotate_and_update_cache(
            self, apply_rotary_pos_emb, query, key, value, position_embeddings, past_key_values, kwargs
        )
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, output.flatten(2), fused=fused), weights
