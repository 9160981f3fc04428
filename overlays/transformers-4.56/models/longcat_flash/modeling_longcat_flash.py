"""ROCm overlay of transformers.models.longcat_flash.modeling_longcat_flash, 4.57 and up.

Served: the latent attention, the rotary embedding, the dense MLPs and the norms. The experts stay stock: some of them
return their input unchanged, which ops.experts does not support.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    import torch
    from transformers.models.longcat_flash.modeling_longcat_flash import (
        LongcatFlashMLA,
        LongcatFlashMLP,
        LongcatFlashRMSNorm,
        LongcatFlashRotaryEmbedding,
        apply_rotary_pos_emb_interleave,
    )

    from hf_rocm import layers, ops

    overlay.binds(LongcatFlashRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(LongcatFlashRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(LongcatFlashMLP, layers.GatedMLP())

    @overlay.replaces(LongcatFlashMLA, fuses=("q_a_proj", "kv_a_proj_with_mqa"))
    def longcat_flash_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        latent, compressed = layers.project(self, hidden_states, "q_a_proj", "kv_a_proj_with_mqa")
        query = self.q_b_proj(self.q_a_layernorm(latent)) * self.mla_scale_q_lora
        (query,) = layers.split_heads((query,), self.qk_head_dim)  # [B, H, S, D]
        plain, query_part = query.split((self.qk_nope_head_dim, self.qk_rope_head_dim), dim=-1)
        latent, key_part = compressed.split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        latent = self.kv_a_layernorm(latent) * self.mla_scale_kv_lora
        query_part, key_part = apply_rotary_pos_emb_interleave(query_part, key_part[:, None], *position_embeddings)
        query = torch.cat((plain, query_part), dim=-1)
        if hasattr(self, "expand_kv"):
            # The cache stores the latent form.
            cached = layers.update_cache(self, latent[:, None], key_part, past_key_values, kwargs)
            key, value = self.expand_kv(*cached)
        else:
            (expanded,) = layers.split_heads((self.kv_b_proj(latent),), self.qk_nope_head_dim + self.v_head_dim)
            key, value = expanded.split((self.qk_nope_head_dim, self.v_head_dim), dim=-1)
            key = torch.cat((key, key_part.expand(-1, key.shape[1], -1, -1)), dim=-1)
            key, value = layers.update_cache(self, key, value, past_key_values, kwargs, position_embeddings)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.flatten(2)), weights
