"""ROCm overlay of transformers.models.deepseek_v2.modeling_deepseek_v2, 4.54 to 4.57."""

try:
    from hf_rocm import overlay  # cheap: reads torch.version.hip and the environment, touches no device
except ImportError:  # hf-rocm was removed: the stock forwards stay
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
        DeepseekV2Attention,
        DeepseekV2DecoderLayer,
        DeepseekV2MLP,
        DeepseekV2MoE,
        DeepseekV2RMSNorm,
        apply_rotary_emb,
    )

    from hf_rocm import layers, ops

    @overlay.replaces(DeepseekV2DecoderLayer)
    def deepseek_v2_decoder_layer(self, stock, hidden_states, *args, **kwargs):
        return layers.decoder_layer(self, stock, hidden_states, args, kwargs)

    @overlay.replaces(DeepseekV2Attention, fuses=("q_a_proj", "kv_a_proj_with_mqa"))
    def deepseek_v2_attention(self, stock, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        if layers.stays_stock(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, attention_mask, past_key_values, **kwargs)

        def turn(query, key):
            return apply_rotary_emb(query, key, kwargs["position_embeddings"].to(query.device))

        query, key, value = layers.latent_heads(
            self, hidden_states, turn, past_key_values, kwargs
        )  # [B, H, S, D | D_v]
        key, value, seen = layers.sees(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return layers.project_out(self, hidden_states, output.flatten(2)), weights

    @overlay.replaces(DeepseekV2MoE, experts=("gate_proj", "up_proj", "down_proj", "act_fn"))
    def deepseek_v2_mixture(self, stock, hidden_states):
        run = layers.listed_experts(self, hidden_states)
        if run is None:
            return stock(self, hidden_states)
        ids, weights = self.gate(hidden_states)
        routed = run(hidden_states.flatten(0, 1), ids, weights).view_as(hidden_states)
        return routed + self.shared_experts(hidden_states)

    @overlay.replaces(DeepseekV2MLP, fuses=("gate_proj", "up_proj"))
    def deepseek_v2_mlp(self, stock, x):
        return layers.gated_mlp(self, stock, x)

    @overlay.replaces(DeepseekV2RMSNorm)
    def deepseek_v2_rms_norm(self, stock, hidden_states):
        return layers.rms_norm(self, stock, hidden_states, eps=self.variance_epsilon)
