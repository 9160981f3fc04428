"""ROCm overlay of transformers.models.qwen2_5_omni.modeling_qwen2_5_omni, 4.53 to 5.16.

Served: the language models and the vision tower. The audio tower and the codec stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        Qwen2_5OmniAttention,
        Qwen2_5OmniMLP,
        Qwen2_5OmniVisionAttention,
        Qwen2MLP,
        apply_multimodal_rotary_pos_emb,
        apply_rotary_pos_emb_vision,
    )

    from hf_rocm import layers, ops

    overlay.binds_first(
        "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni",
        Qwen2_5OmniRMSNorm=layers.RMSNorm(eps="variance_epsilon"),
        Qwen2RMSNorm=layers.RMSNorm(eps="variance_epsilon"),
    )
    overlay.binds(Qwen2MLP, layers.GatedMLP())
    overlay.binds(Qwen2_5OmniMLP, layers.GatedMLP())

    @overlay.replaces(Qwen2_5OmniAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen2_5_omni_attention(
        self, stock, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, *more, **kwargs
    ):
        angles = kwargs.get("position_embeddings")
        extra_reason = (
            "the call has no position embeddings, or has extra positional arguments" if more or angles is None else None
        )
        if layers.fallback_reason(
            self, attention_mask, kwargs, dropout=self.attention_dropout, extra_reason=extra_reason
        ):
            return stock(self, hidden_states, attention_mask, position_ids, past_key_values, *more, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        sections = (getattr(self, "rope_scaling", None) or self.config.rope_parameters)["mrope_section"]
        query, key = apply_multimodal_rotary_pos_emb(query, key, *angles, sections)
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs, angles)
        key, value, seen = layers.visible_keys(
            self, query, key, value, attention_mask, kwargs, window=self.sliding_window
        )
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.pack_outputs(self.o_proj(output.flatten(2)), weights, past_key_values)

    @overlay.replaces(Qwen2_5OmniVisionAttention, fuses=("q", "k", "v"))
    def qwen2_5_omni_vision_attention(self, stock, hidden_states, cu_seqlens, *more, rotary_pos_emb=None, **kwargs):
        extra_reason = (
            "the call has no rotary_pos_emb, or has extra positional arguments"
            if more or rotary_pos_emb is None
            else None
        )
        if layers.fallback_reason(self, None, kwargs, extra_reason=extra_reason):
            if rotary_pos_emb is not None:
                kwargs["rotary_pos_emb"] = rotary_pos_emb
            return stock(self, hidden_states, cu_seqlens, *more, **kwargs)
        parts = layers.project(self, hidden_states, "q", "k", "v")  # [T, H · D]
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)  # [T, H, D]
        query = apply_rotary_pos_emb_vision(query[None], rotary_pos_emb)[0]
        key = apply_rotary_pos_emb_vision(key[None], rotary_pos_emb)[0]
        output = layers.packed(query, key, value, cu_seqlens, scale=self.scaling)
        return self.proj(output.flatten(1))
