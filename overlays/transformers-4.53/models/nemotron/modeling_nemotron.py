"""ROCm overlay of transformers.models.nemotron.modeling_nemotron, 4.53 to 5.12.

The model's MLP, which has no gate, and its LayerNorm stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    # the class table selects NemotronSdpaAttention; its base class, NemotronAttention, is imported for its digest
    from transformers.models.nemotron.modeling_nemotron import (
        NemotronAttention,  # noqa: F401
        NemotronRotaryEmbedding,
        NemotronSdpaAttention,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(NemotronRotaryEmbedding, layers.RotaryEmbedding())

    @overlay.replaces(NemotronSdpaAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def nemotron_attention(
        self,
        stock,
        hidden_states,
        position_embeddings,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        **kwargs,
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            rest = (attention_mask, position_ids, past_key_values)
            return stock(self, hidden_states, position_embeddings, *rest, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        terms = {"scale": self.head_dim**-0.5}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.pack_outputs(self.o_proj(output), weights, past_key_values)
