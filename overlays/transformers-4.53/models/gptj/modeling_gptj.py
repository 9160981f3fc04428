"""ROCm overlay of transformers.models.gptj.modeling_gptj, 4.53 and up.

Served: attention under `eager`, stock's default. The rotation of neighbouring pairs, the MLP, which has no gate, and
LayerNorm stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    import torch
    from transformers.models.gptj.modeling_gptj import GPTJAttention, apply_rotary_pos_emb

    from hf_rocm import layers, ops

    with_cache = layers.before("4.54")

    @overlay.replaces(GPTJAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def gptj_attention(self, stock, hidden_states, *more, **kwargs):
        mask, cache, dropout = kwargs.get("attention_mask"), kwargs.get("layer_past"), self.attn_dropout
        extra_reason = "the call has extra positional arguments" if more else None
        if layers.fallback_reason(self, mask, kwargs, dropout=dropout, extra_reason=extra_reason, beyond_sdpa=True):
            return stock(self, hidden_states, *more, **kwargs)
        parts = layers.project(self, hidden_states, "q_proj", "k_proj", "v_proj")
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)  # [B, S, H, D]
        positions = kwargs["position_ids"]
        table = self._get_embed_positions(positions)[0]
        sin, cos = table[positions].chunk(2, dim=-1)  # [B | 1, S, R / 2]
        query, key = (_rotated(self, part, sin, cos).transpose(1, 2) for part in (query, key))
        value = value.transpose(1, 2)
        key, value = layers.update_cache(self, key, value, cache, kwargs, (cos, sin))
        key, value, seen = layers.visible_keys(self, query, key, value, mask, kwargs)
        output, _ = ops.attention(query, key, value, scale=1 / _root(self), **seen)
        output = self.resid_dropout(self.out_proj(output.flatten(2)))
        return (output, cache) if with_cache else (output, None)

    def _root(self):
        """Return the square root of the head dim. Up to 4.57, stock stores it in a tensor that is not a buffer."""
        root = self.scale_attn
        return layers.rounded_root(self.head_dim, root.dtype) if isinstance(root, torch.Tensor) else root

    def _rotated(self, part, sin, cos):
        sin, cos = sin.to(part.dtype), cos.to(part.dtype)
        if self.rotary_dim is None:
            return apply_rotary_pos_emb(part, sin, cos)
        rotated = apply_rotary_pos_emb(part[..., : self.rotary_dim], sin, cos)
        return torch.cat((rotated, part[..., self.rotary_dim :]), dim=-1)
