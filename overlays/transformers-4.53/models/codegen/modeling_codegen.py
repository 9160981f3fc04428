"""ROCm overlay of transformers.models.codegen.modeling_codegen, 4.53 and up.

Served: attention; stock implements only `eager`. The rotation of neighbouring pairs, the MLP (which has no gate) and
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
    from transformers.models.codegen.modeling_codegen import CodeGenAttention, apply_rotary_pos_emb

    from hf_rocm import layers, ops

    with_cache = layers.before("4.54")
    # The joined projection consists of four blocks, each with queries, values and keys.
    blocks = 4

    @overlay.replaces(CodeGenAttention)
    def codegen_attention(self, stock, hidden_states, *more, **kwargs):
        mask, cache, dropout = kwargs.get("attention_mask"), kwargs.get("layer_past"), self.attn_dropout
        extra_reason = "the call has extra positional arguments" if more else None
        if layers.fallback_reason(self, mask, kwargs, dropout=dropout, extra_reason=extra_reason):
            return stock(self, hidden_states, *more, **kwargs)
        joined = self.qkv_proj(hidden_states).unflatten(-1, (blocks, 3, -1, self.head_dim))
        query, value, key = (part.flatten(2, 3) for part in joined.unbind(3))  # [B, S, H, D]
        sin, cos = _table(self, hidden_states)[kwargs["position_ids"]].chunk(2, dim=-1)  # [B | 1, S, R / 2], fp32
        query, key = (_rotated(self, part, sin, cos).transpose(1, 2) for part in (query, key))
        value = value.transpose(1, 2)
        key, value = layers.update_cache(self, key, value, cache, kwargs, (cos, sin))
        key, value, seen = layers.visible_keys(self, query, key, value, mask, {"is_causal": False})
        output, _ = ops.attention(query, key, value, scale=1 / _root(self), **seen)
        output = self.resid_dropout(self.out_proj(output.flatten(2)))
        return (output, cache) if with_cache else (output, None)

    def _root(self):
        """Return the square root of the head dim. Up to 4.57, stock stores it in a tensor that is not a buffer."""
        root = self.scale_attn
        return layers.rounded_root(self.head_dim, root.dtype) if isinstance(root, torch.Tensor) else root

    def _table(self, hidden_states):
        if self.embed_positions.device != hidden_states.device:
            self.embed_positions = self.embed_positions.to(hidden_states.device)
        return self.embed_positions

    def _rotated(self, part, sin, cos):
        width = part.shape[-1] if self.rotary_dim is None else self.rotary_dim
        rotated = apply_rotary_pos_emb(part[..., :width], sin, cos).to(part.dtype)
        return torch.cat((rotated, part[..., width:]), dim=-1)
