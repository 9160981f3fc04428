"""ROCm overlay of transformers.models.ministral3.modeling_ministral3, 5.4 and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.ministral3.modeling_ministral3 import (
        Ministral3Attention,
        Ministral3DecoderLayer,
        Ministral3MLP,
        Ministral3RMSNorm,
        apply_rotary_pos_emb,
        get_llama_4_attn_scale,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(Ministral3DecoderLayer)
    def ministral3_decoder_layer(self, stock, hidden_states, *args, **kwargs):
        return layers.decoder_layer(self, stock, hidden_states, args, kwargs)

    @overlay.replaces(Ministral3Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def ministral3_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, position_ids, past_key_values=None, **kwargs
    ):
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.attention_dropout):
            rest = (attention_mask, position_ids, past_key_values)
            return stock(self, hidden_states, position_embeddings, *rest, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        query, key = layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings)
        rope, window = self.config.rope_parameters, getattr(self.config, "sliding_window", None)
        beta, trained = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        query = query * get_llama_4_attn_scale(position_ids, beta, trained).to(query.dtype)
        key, value = layers.remember(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs, window=window)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, hidden_states, output.flatten(2)), weights

    @overlay.replaces(Ministral3MLP, fuses=("gate_proj", "up_proj"))
    def ministral3_mlp(self, stock, x):
        return layers.gated_mlp(self, stock, x)

    @overlay.replaces(Ministral3RMSNorm)
    def ministral3_rms_norm(self, stock, hidden_states):
        return layers.rms_norm(self, stock, hidden_states, eps=self.variance_epsilon)
