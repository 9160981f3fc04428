"""ROCm overlay of transformers.models.qwen3_moe.modeling_qwen3_moe, 5.0 and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import (
        Qwen3MoeAttention,
        Qwen3MoeDecoderLayer,
        Qwen3MoeExperts,
        Qwen3MoeMLP,
        Qwen3MoeRMSNorm,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(Qwen3MoeDecoderLayer)
    def qwen3_moe_decoder_layer(self, stock, hidden_states, *args, **kwargs):
        return layers.decoder_layer(self, stock, hidden_states, args, kwargs)

    @overlay.replaces(Qwen3MoeAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen3_moe_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        names = ("q_proj", "k_proj", "v_proj")
        query, key, value = layers.heads(self, hidden_states, *names, norms=("q_norm", "k_norm"))  # [B, H | Hkv, S, D]
        query, key, value = layers.rotate_and_remember(
            self, apply_rotary_pos_emb, query, key, value, position_embeddings, past_key_values, kwargs
        )
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs, window=self.sliding_window)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, hidden_states, output.flatten(2)), weights

    @overlay.replaces(Qwen3MoeExperts)
    def qwen3_moe_experts(self, stock, hidden_states, top_k_index, top_k_weights):
        return layers.stacked_experts(self, stock, hidden_states, top_k_index, top_k_weights)

    @overlay.replaces(Qwen3MoeMLP, fuses=("gate_proj", "up_proj"))
    def qwen3_moe_mlp(self, stock, x):
        return layers.gated_mlp(self, stock, x)

    @overlay.replaces(Qwen3MoeRMSNorm)
    def qwen3_moe_rms_norm(self, stock, hidden_states):
        return layers.rms_norm(self, stock, hidden_states, eps=self.variance_epsilon)
