"""ROCm overlay of transformers.models.gemma3.modeling_gemma3, 4.53 and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.gemma3.modeling_gemma3 import (
        Gemma3Attention,
        Gemma3DecoderLayer,
        Gemma3MLP,
        Gemma3RMSNorm,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(Gemma3DecoderLayer)
    def gemma3_decoder_layer(self, stock, hidden_states, *args, **kwargs):
        return layers.decoder_layer(
            self,
            stock,
            hidden_states,
            args,
            kwargs,
            norms=("input_layernorm", "pre_feedforward_layernorm"),
            post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        )

    @overlay.replaces(Gemma3Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def gemma3_attention(
        self, stock, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
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

    @overlay.replaces(Gemma3MLP, fuses=("gate_proj", "up_proj"))
    def gemma3_mlp(self, stock, x):
        return layers.gated_mlp(self, stock, x)

    @overlay.replaces(Gemma3RMSNorm)
    def gemma3_rms_norm(self, stock, x):
        return layers.rms_norm(self, stock, x, eps=self.eps, one_plus=True)
