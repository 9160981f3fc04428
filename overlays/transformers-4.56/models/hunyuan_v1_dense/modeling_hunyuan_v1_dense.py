"""ROCm overlay of transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense, 4.56 and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
        HunYuanDenseV1Attention,
        HunYuanDenseV1DecoderLayer,
        HunYuanDenseV1MLP,
        HunYuanDenseV1RMSNorm,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(HunYuanDenseV1DecoderLayer)
    def hunyuan_v1_dense_decoder_layer(self, stock, hidden_states, *args, **kwargs):
        return layers.decoder_layer(self, stock, hidden_states, args, kwargs)

    @overlay.replaces(HunYuanDenseV1Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def hunyuan_dense_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        query, key = layers.rotate(apply_rotary_pos_emb, query, key, position_embeddings)
        query, key = self.query_layernorm(query), self.key_layernorm(key)
        key, value = layers.remember(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, hidden_states, output.flatten(2)), weights

    @overlay.replaces(HunYuanDenseV1MLP, fuses=("gate_proj", "up_proj"))
    def hunyuan_dense_mlp(self, stock, x):
        return layers.gated_mlp(self, stock, x)

    @overlay.replaces(HunYuanDenseV1RMSNorm)
    def hunyuan_dense_rms_norm(self, stock, hidden_states):
        return layers.rms_norm(self, stock, hidden_states, eps=self.variance_epsilon)
