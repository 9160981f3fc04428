"""ROCm overlay of transformers.models.qwen2_moe.modeling_qwen2_moe, 4.53 to 4.57."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen2_moe.modeling_qwen2_moe import (
        Qwen2MoeMLP,
        Qwen2MoeRMSNorm,
        Qwen2MoeRotaryEmbedding,
        Qwen2MoeSdpaAttention,
        Qwen2MoeSparseMoeBlock,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Qwen2MoeRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Qwen2MoeRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Qwen2MoeMLP, layers.GatedMLP())
    overlay.binds(
        Qwen2MoeSparseMoeBlock,
        layers.SoftmaxMoE(normalise="norm_topk_prob", shared=("shared_expert", "shared_expert_gate")),
    )

    @overlay.replaces(Qwen2MoeSdpaAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen2_moe_attention(
        self, stock, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, attention_mask, position_ids, past_key_values, **kwargs)
        position_embeddings = kwargs["position_embeddings"]
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        terms = {"scale": self.head_dim**-0.5}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.pack_outputs(self.o_proj(output), weights, past_key_values)
