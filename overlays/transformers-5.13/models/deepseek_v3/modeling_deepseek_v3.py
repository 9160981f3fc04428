"""ROCm overlay of transformers.models.deepseek_v3.modeling_deepseek_v3, 5.13 and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Attention,
        DeepseekV3DecoderLayer,
        DeepseekV3Experts,
        DeepseekV3MLP,
        DeepseekV3RMSNorm,
        apply_rotary_pos_emb,
        apply_rotary_pos_emb_interleave,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(DeepseekV3DecoderLayer)
    def deepseek_v3_decoder_layer(self, stock, hidden_states, *args, **kwargs):
        return layers.decoder_layer(self, stock, hidden_states, args, kwargs)

    @overlay.replaces(DeepseekV3Attention, fuses=("q_a_proj", "kv_a_proj_with_mqa"))
    def deepseek_v3_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)

        def turn(query, key):
            if self.config.rope_interleave:
                return apply_rotary_pos_emb_interleave(query, key, *position_embeddings)
            return layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings)

        query, key, value = layers.latent_heads(
            self, hidden_states, turn, past_key_values, kwargs, position_embeddings
        )  # [B, H, S, D | D_v]
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, hidden_states, output.flatten(2)), weights

    @overlay.replaces(DeepseekV3Experts)
    def deepseek_v3_experts(self, stock, hidden_states, top_k_index, top_k_weights):
        return layers.stacked_experts(self, stock, hidden_states, top_k_index, top_k_weights)

    @overlay.replaces(DeepseekV3MLP, fuses=("gate_proj", "up_proj"))
    def deepseek_v3_mlp(self, stock, x):
        return layers.gated_mlp(self, stock, x)

    @overlay.replaces(DeepseekV3RMSNorm)
    def deepseek_v3_rms_norm(self, stock, hidden_states):
        return layers.rms_norm(self, stock, hidden_states, eps=self.variance_epsilon)
