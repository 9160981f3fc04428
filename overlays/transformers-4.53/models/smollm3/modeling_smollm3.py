"""ROCm overlay of transformers.models.smollm3.modeling_smollm3, 4.53 and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: keep the stock forwards
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.smollm3.modeling_smollm3 import (
        SmolLM3Attention,
        SmolLM3DecoderLayer,
        SmolLM3MLP,
        SmolLM3RMSNorm,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    overlay.binds(SmolLM3RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(SmolLM3MLP, layers.GatedMLP())
    overlay.binds(SmolLM3DecoderLayer, layers.PreNormLayer())

    @overlay.replaces(SmolLM3Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def smollm3_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        if self.use_rope:
            query, key = layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs)
        key, value, seen = layers.visible_keys(
            self, query, key, value, attention_mask, kwargs, window=self.sliding_window
        )
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, output.flatten(2), fused=fused), weights
