"""ROCm overlay of transformers.models.ministral3.modeling_ministral3, 5.4 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.ministral3.modeling_ministral3 import (
        Ministral3Attention,
        Ministral3DecoderLayer,
        Ministral3MLP,
        Ministral3RMSNorm,
        Ministral3RotaryEmbedding,
        apply_rotary_pos_emb,
        get_llama_4_attn_scale,
    )

    from hf_rocm import layers, ops

    overlay.binds(Ministral3RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Ministral3RotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Ministral3MLP, layers.GatedMLP())
    overlay.binds(Ministral3DecoderLayer, layers.PreNormLayer())

    @overlay.replaces(Ministral3Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def ministral3_attention(
        self,
        stock,
        hidden_states,
        position_embeddings,
        attention_mask,
        position_ids,
        past_key_values=None,
        fused=None,
        **kwargs,
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            rest = (attention_mask, position_ids, past_key_values)
            return stock(self, hidden_states, position_embeddings, *rest, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        query, key = layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings)
        rope, window = self.config.rope_parameters, getattr(self.config, "sliding_window", None)
        beta, trained = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        query = query * get_llama_4_attn_scale(position_ids, beta, trained).to(query.dtype)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs, window=window)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, output.flatten(2), fused=fused), weights
