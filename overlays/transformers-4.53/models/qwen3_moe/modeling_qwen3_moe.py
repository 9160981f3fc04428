"""ROCm overlay of transformers.models.qwen3_moe.modeling_qwen3_moe, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import (
        Qwen3MoeAttention,
        Qwen3MoeDecoderLayer,
        Qwen3MoeMLP,
        Qwen3MoeRMSNorm,
        Qwen3MoeRotaryEmbedding,
        Qwen3MoeSparseMoeBlock,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Qwen3MoeRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Qwen3MoeRotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Qwen3MoeMLP, layers.GatedMLP())
    overlay.binds_first(
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        Qwen3MoeExperts=layers.StackedExperts(),
        Qwen3MoeSparseMoeBlock=layers.SoftmaxMoE(normalise="norm_topk_prob"),
    )
    if not layers.before("5.0"):
        overlay.binds(Qwen3MoeSparseMoeBlock, layers.SparseMoE())
    # Older routers are part of the MoE block, or return probabilities instead of logits.
    if not layers.before("5.6"):
        overlay.binds_first(
            "transformers.models.qwen3_moe.modeling_qwen3_moe",
            Qwen3MoeTopKRouter=layers.TopKRouter(normalise="norm_topk_prob"),
            Qwen3MoeSparseMoeBlock=layers.SoftmaxMoE(normalise="norm_topk_prob"),
        )
    overlay.binds(Qwen3MoeDecoderLayer, layers.PreNormLayer())

    @overlay.replaces(Qwen3MoeAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def qwen3_moe_attention(
        self, stock, hidden_states, position_embeddings, attention_mask, past_key_values=None, fused=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        names, norms = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
        heads = layers.heads(self, hidden_states, *names, fused=fused)
        terms = {"scale": self.scaling, "norms": norms, "window": self.sliding_window}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.project_out(self, output, fused=fused), weights
