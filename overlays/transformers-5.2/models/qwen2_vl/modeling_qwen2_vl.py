"""ROCm overlay of transformers.models.qwen2_vl.modeling_qwen2_vl, 5.2 to 5.16."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen2_vl.modeling_qwen2_vl import (
        Qwen2MLP,
        Qwen2VLAttention,
        Qwen2VLRMSNorm,
        VisionAttention,
        apply_multimodal_rotary_pos_emb,
        apply_rotary_pos_emb_vision,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(Qwen2VLAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen2_vl_attention(
        self, stock, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, *more, **kwargs
    ):
        angles = kwargs.get("position_embeddings")
        further = "the call has no position embeddings" if more or angles is None else None
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.attention_dropout, further=further):
            return stock(self, hidden_states, attention_mask, position_ids, past_key_values, *more, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        sections = self.config.rope_parameters["mrope_section"]
        query, key = apply_multimodal_rotary_pos_emb(query, key, *angles, sections)
        key, value = layers.remember(self, key, value, past_key_values, kwargs, angles)
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs, window=self.sliding_window)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.answered(self.o_proj(output.flatten(2)), weights, past_key_values)

    @overlay.replaces(VisionAttention)
    def qwen2_vl_vision_attention(self, stock, hidden_states, cu_seqlens, *more, position_embeddings=None, **kwargs):
        further = "the call has no position embeddings" if more or position_embeddings is None else None
        dropout = getattr(self, "attention_dropout", 0.0)
        if layers.stays_stock(self, None, kwargs, dropout=dropout, further=further):
            return stock(self, hidden_states, cu_seqlens, *more, position_embeddings=position_embeddings, **kwargs)
        query, key, value = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).unbind(1)  # [T, H, D]
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        output = layers.packed(query, key, value, cu_seqlens, scale=self.head_dim**-0.5)
        return self.proj(output.flatten(1))

    @overlay.replaces(Qwen2MLP, fuses=("gate_proj", "up_proj"))
    def qwen2_vl_mlp(self, stock, x):
        return layers.gated_mlp(self, stock, x)

    @overlay.replaces(Qwen2VLRMSNorm)
    def qwen2_vl_rms_norm(self, stock, hidden_states):
        return layers.rms_norm(self, stock, hidden_states, eps=self.variance_epsilon)
