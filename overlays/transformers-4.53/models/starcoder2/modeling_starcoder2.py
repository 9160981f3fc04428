"""ROCm overlay of transformers.models.starcoder2.modeling_starcoder2, 4.53 and up.

The model's MLP, which has no gate, and its LayerNorm stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from torch.nn.functional import dropout
    from transformers.models.starcoder2.modeling_starcoder2 import (
        Starcoder2Attention,
        Starcoder2DecoderLayer,
        Starcoder2RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Starcoder2RotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Starcoder2DecoderLayer, layers.PreNormLayer())

    @overlay.replaces(Starcoder2Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def starcoder2_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        terms = {"scale": self.scaling, "window": getattr(self.config, "sliding_window", None)}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return dropout(self.o_proj(output), self.residual_dropout, self.training), weights
