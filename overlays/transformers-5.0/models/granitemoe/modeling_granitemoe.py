"""ROCm overlay of transformers.models.granitemoe.modeling_granitemoe, 5.0 to 5.12."""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.granitemoe.modeling_granitemoe import (
        GraniteMoeAttention,
        GraniteMoeMoE,
        GraniteMoeParallelExperts,  # noqa: F401 - imported for its digest
        GraniteMoeRMSNorm,
        GraniteMoeRotaryEmbedding,
        GraniteMoeTopKGating,  # noqa: F401 - imported for its digest
        apply_rotary_pos_emb,
    )

    from hf_rocm import layers

    overlay.binds(GraniteMoeRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(GraniteMoeRotaryEmbedding, layers.RotaryEmbedding())

    @overlay.replaces(GraniteMoeAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def granitemoe_attention(
        self, stock, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout, pages=True):
            return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        terms = {"scale": self.scaling}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return self.o_proj(output), weights

    @overlay.replaces(GraniteMoeMoE)
    def granitemoe_block(self, stock, layer_input):
        plain = layers.untouched(self.router, self.input_linear, self.output_linear)
        run = layers.given_experts(
            self,
            layer_input,
            gate_up="input_linear.weight",
            down="output_linear.weight",
            act_fn="activation",
            extra_reason=None if plain else "the router or the experts have hooks",
        )
        if run is None:
            return stock(self, layer_input)
        rows = layer_input.flatten(0, 1)  # [T, H]
        router_logits = self.router.layer(rows).float()
        chosen, ids = router_logits.topk(self.router.top_k, dim=1)
        weights = chosen.softmax(1).type_as(rows)
        return run(rows, ids, weights).view_as(layer_input)
