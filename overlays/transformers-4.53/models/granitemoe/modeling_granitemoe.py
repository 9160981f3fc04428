"""ROCm overlay of transformers.models.granitemoe.modeling_granitemoe, 4.53 to 4.57."""

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
        self, stock, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, **kwargs
    ):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, attention_mask, position_ids, past_key_values, **kwargs)
        position_embeddings = kwargs["position_embeddings"]
        heads = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        terms = {"scale": self.scaling}
        output, weights = layers.attend(
            self, apply_rotary_pos_emb, heads, position_embeddings, past_key_values, attention_mask, kwargs, **terms
        )
        return layers.pack_outputs(self.o_proj(output), weights, past_key_values)

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
        return run(rows, ids, weights).view_as(layer_input), router_logits
