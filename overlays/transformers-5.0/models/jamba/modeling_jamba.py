"""ROCm overlay of transformers.models.jamba.modeling_jamba, 5.0 and up.

Served: attention, the experts, the MLPs and the norms. The state-space layers stay stock.
"""

try:
    # Cheap: reads torch.version.hip and the environment, touches no device.
    from hf_rocm import overlay
except ImportError:
    # hf-rocm was removed: keep the stock forwards.
    overlay = None

if overlay is not None and overlay.wanted(__name__):
    from transformers.models.jamba.modeling_jamba import JambaAttention, JambaExperts, JambaMLP, JambaRMSNorm

    from hf_rocm import layers, ops

    overlay.binds(JambaRMSNorm, layers.RMSNorm(eps="variance_epsilon"))
    overlay.binds(JambaMLP, layers.GatedMLP())
    overlay.binds(JambaExperts, layers.StackedExperts())

    @overlay.replaces(JambaAttention, fuses=("q_proj", "k_proj", "v_proj"))
    def jamba_attention(self, stock, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        if layers.fallback_reason(self, attention_mask, kwargs, dropout=self.attention_dropout):
            return stock(self, hidden_states, attention_mask, past_key_values, **kwargs)
        query, key, value = layers.heads(self, hidden_states, "q_proj", "k_proj", "v_proj")  # [B, H | Hkv, S, D]
        key, value = layers.update_cache(self, key, value, past_key_values, kwargs)
        key, value, seen = layers.visible_keys(self, query, key, value, attention_mask, kwargs)
        output, weights = ops.attention(query, key, value, scale=self.scaling, **seen)
        return self.o_proj(output.flatten(2)), weights
