"""ROCm overlay of transformers.models.mixtral.modeling_mixtral, 5.0 and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: keep the stock forwards
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.mixtral.modeling_mixtral import (
        MixtralAttention,
        MixtralDecoderLayer,
        MixtralExperts,
        MixtralRMSNorm,
        MixtralTopKRouter,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(MixtralRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(MixtralExperts, layers.StackedExperts())
    if not layers.before("5.6"):  # older routers return probabilities instead of logits
        overlay.binds(MixtralTopKRouter, layers.TopKRouter(normalise=True, wide=True))
    overlay.binds(MixtralDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(MixtralAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def mixtral_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        query, key = layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings)
        window = getattr(self.config, "sliding_window", None)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs, window=window)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, output.flatten(2), fused=fused), weights
