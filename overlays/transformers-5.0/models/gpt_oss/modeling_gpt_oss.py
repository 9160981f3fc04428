"""ROCm overlay of transformers.models.gpt_oss.modeling_gpt_oss, 5.0 and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.gpt_oss.modeling_gpt_oss import (
        GptOssAttention,
        GptOssDecoderLayer,
        GptOssExperts,
        GptOssRMSNorm,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(GptOssDecoderLayer)
    def gpt_oss_decoder_layer(self, stock, hidden_states, *args, **kwargs):
        return layers.decoder_layer(self, stock, hidden_states, args, kwargs)

    @overlay.replaces(GptOssAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def gpt_oss_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.attention_dropout, beyond_sdpa=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = layers.remember(self, key, value, past_key_values, kwargs, position_embeddings)
        window, sinks = self.sliding_window, self.sinks
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs, window=window, sinks=sinks)
        output, weights = ops.attention(query, key, value, scale=self.scaling, sinks=sinks, **seen)
        return layers.project_out(self, hidden_states, output.flatten(2)), weights

    @overlay.replaces(GptOssExperts)
    def gpt_oss_experts(self, stock, hidden_states, router_indices=None, routing_weights=None):
        terms = {"activation": "clamped_swiglu", "limit": self.limit, "alpha": self.alpha}
        terms |= {"transposed": True, "interleaved": True}
        return layers.stacked_experts(self, stock, hidden_states, router_indices, routing_weights, **terms)

    @overlay.replaces(GptOssRMSNorm)
    def gpt_oss_rms_norm(self, stock, hidden_states):
        return layers.rms_norm(self, stock, hidden_states, eps=self.variance_epsilon)
