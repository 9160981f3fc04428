"""ROCm overlay of transformers.models.pixtral.modeling_pixtral, 4.53 and up."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.pixtral.modeling_pixtral import (
        PixtralAttention,
        PixtralMLP,
        PixtralRMSNorm,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(PixtralAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def pixtral_attention(self, stock, hidden_states, attention_mask=None, position_embeddings=None, *more, **kwargs):
        further = "positional arguments stay stock" if more else None
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.dropout, further=further):
            return stock(self, hidden_states, attention_mask, position_embeddings, *more, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H, S, D]
        cos, sin = position_embeddings  # [S, D], of all patches of the batch
        query, key = layers.rotate(apply_rotary_pos_emb, query, key, (cos[None], sin[None]))
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.flatten(2)), weights

    @overlay.replaces(PixtralMLP, fuses=("gate_proj", "up_proj"))
    def pixtral_mlp(self, stock, x):
        return layers.gated_mlp(self, stock, x)

    @overlay.replaces(PixtralRMSNorm)
    def pixtral_rms_norm(self, stock, hidden_states):
        return layers.rms_norm(self, stock, hidden_states, eps=self.variance_epsilon)
