"""ROCm overlay of transformers.models.dots1.modeling_dots1, 4.53 and up."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.dots1.modeling_dots1 import (
        Dots1Attention,
        Dots1DecoderLayer,
        Dots1MLP,
        Dots1RMSNorm,
        Dots1RotaryEmbedding,
        Dots1TopkRouter,
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(Dots1RMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(Dots1RotaryEmbedding, layers.RotaryEmbedding())
    overlay.binds(Dots1MLP, layers.GatedMLP())
    overlay.binds_first(
        "transformers.models.dots1.modeling_dots1",
        Dots1Experts=layers.StackedExperts(),
        Dots1NaiveMoe=layers.StackedExperts(),
        Dots1MoE=layers.GatedMoE(),
    )
    overlay.binds(Dots1DecoderLayer, layers.PreNormLayer())
    # Older routers do not return (logits, weights, ids).
    if not layers.before("5.13"):
        overlay.binds(Dots1TopkRouter, layers.GroupedRouter())

    @overlay.replaces(Dots1Attention, fuses=("q_proj", "k_proj", "v_proj"))
    def dots1_attention(
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
