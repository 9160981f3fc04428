"""ROCm overlay of transformers.models.glm4.modeling_glm4, 4.53 and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.glm4.modeling_glm4 import (
        Glm4Attention,
        Glm4DecoderLayer,
        Glm4MLP,
        Glm4RMSNorm,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(Glm4DecoderLayer)
    def glm4_decoder_layer(self, stock, hidden_states, *args, **kwargs):
        return layers.decoder_layer(
            self,
            stock,
            hidden_states,
            args,
            kwargs,
            post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
        )

    @overlay.replaces(Glm4Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def glm4_attention(
        self, stock, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = layers.remember(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, hidden_states, output.flatten(2)), weights

    @overlay.replaces(Glm4MLP)
    def glm4_mlp(self, stock, hidden_states):
        return layers.joined_mlp(self, hidden_states)

    @overlay.replaces(Glm4RMSNorm)
    def glm4_rms_norm(self, stock, hidden_states):
        return layers.rms_norm(self, stock, hidden_states, eps=self.variance_epsilon)
