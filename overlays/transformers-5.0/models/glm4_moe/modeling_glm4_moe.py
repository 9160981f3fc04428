"""ROCm overlay of transformers.models.glm4_moe.modeling_glm4_moe, 5.0 to 5.12."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.glm4_moe.modeling_glm4_moe import (
        Glm4MoeAttention,
        Glm4MoeDecoderLayer,
        Glm4MoeMLP,
        Glm4MoeNaiveMoe,
        Glm4MoeRMSNorm,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(Glm4MoeDecoderLayer)
    def glm4_moe_decoder_layer(self, stock, hidden_states, *args, **kwargs):
        return layers.decoder_layer(self, stock, hidden_states, args, kwargs)

    @overlay.replaces(Glm4MoeAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def glm4_moe_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        names = ("q_proj", "k_proj", "v_proj")
        query, key, value = layers.heads(self, hidden_states, *names, norms=("q_norm", "k_norm"))  # [B, H | Hkv, S, D]
        query, key, value = layers.rotate_and_remember(
            self, apply_rotary_pos_emb, query, key, value, position_embeddings, past_key_values, kwargs
        )
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, hidden_states, output.flatten(2)), weights

    @overlay.replaces(Glm4MoeNaiveMoe)
    def glm4_moe_experts(self, stock, hidden_states, top_k_index, top_k_weights):
        return layers.stacked_experts(self, stock, hidden_states, top_k_index, top_k_weights)

    @overlay.replaces(Glm4MoeMLP, fuses=("gate_proj", "up_proj"))
    def glm4_moe_mlp(self, stock, x):
        return layers.gated_mlp(self, stock, x)

    @overlay.replaces(Glm4MoeRMSNorm)
    def glm4_moe_rms_norm(self, stock, hidden_states):
        return layers.rms_norm(self, stock, hidden_states, eps=self.variance_epsilon)
