"""ROCm overlay of transformers.models.vaultgemma.modeling_vaultgemma, 4.57 and up.

Attention is served with the softcap under `eager` and `sdpa`. Before transformers 5.21, `sdpa` is the default, and its
stock function ignores the softcap. From 5.21 on, `eager` is the default, and stock raises an error under `sdpa`.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.vaultgemma.modeling_vaultgemma import (
        VaultGemmaAttention,
        VaultGemmaDecoderLayer,
        VaultGemmaMLP,
        VaultGemmaRMSNorm,
        VaultGemmaRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(VaultGemmaRMSNorm, layers.RMSNorm(eps="eps", one_plus=True))
    overlay.binds(VaultGemmaRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(VaultGemmaMLP, layers.GatedMLP())
    overlay.binds(VaultGemmaDecoderLayer, layers.PreNormLayer(norms=("input_layernorm", "pre_feedforward_layernorm")))

    @overlay.replaces(VaultGemmaAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def vaultgemma_attention(
        self,
        stock,
        hidden_states,
        position_embeddings=None,
        attention_mask=None,
        past_key_values=None,
        fused=None,
        **kwargs,
    ):
        if layers.fallback_reason(
            self, attention_mask, kwargs, dropout=self.attention_dropout, beyond_sdpa=True, pages=True
        ):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj", fused=fused)
        terms = {"scale": self.scaling, "window": self.sliding_window, "softcap": self.attn_logit_softcapping}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights
