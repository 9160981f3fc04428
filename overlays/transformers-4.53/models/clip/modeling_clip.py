"""ROCm overlay of transformers.models.clip.modeling_clip, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.clip.modeling_clip import CLIPMLP, CLIPAttention, CLIPEncoderLayer

    from hf_rocm import layers, ops

    overlay.binds(CLIPEncoderLayer, layers.PreNormEncoderLayer())
    overlay.binds(CLIPMLP, layers.PlainMLP())

    @overlay.replaces(CLIPAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def clip_attention(self, stock, hidden_states, attention_mask=None, *more, **kwargs):
        if more or layers.fallback_reason(self, attention_mask, kwargs, dropout=self.dropout):
            return stock(self, hidden_states, attention_mask, *more, **kwargs)
        # Up to 4.57, the text model passes two additive masks.
        causal_mask = kwargs.get("causal_attention_mask")
        if causal_mask is not None:
            attention_mask = causal_mask if attention_mask is None else attention_mask + causal_mask
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H, S, D]
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scale, **seen)
        return self.out_proj(output.flatten(2)), weights
