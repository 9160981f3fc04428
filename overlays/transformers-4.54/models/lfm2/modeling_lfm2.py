"""ROCm overlay of transformers.models.lfm2.modeling_lfm2, 4.54 and up.

Served: the attention layers, the rotary embedding, MLPs and norms. The short convolutions stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.lfm2.modeling_lfm2 import (
        Lfm2Attention,
        Lfm2MLP,
        Lfm2RMSNorm,
        Lfm2RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Lfm2RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Lfm2RotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Lfm2MLP, layers.GatedMLP(fuses=("w1", "w3"), activation="silu", down="w2"))

    @overlay.replaces(Lfm2Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def lfm2_attention(self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        names, norms = ("q_proj", "k_proj", "v_proj"), ("q_layernorm", "k_layernorm")
        heads = layers.heads(self, hidden_states, *names)  # [B, H | Hkv, S, D]
        terms = {"scale": self.scaling, "norms": norms}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return self.out_proj(output), weights
