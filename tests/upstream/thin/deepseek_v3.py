"""ModelTesterMixin on a tiny deepseek_v3, with latent attention, a dense layer, and a layer of four experts."""

import unittest

from ...thin import CausalTest


class DeepseekV3ModelTest(CausalTest, unittest.TestCase):
    model_type = "deepseek_v3"
    test_all_params_have_gradient = False
    sizes = {  # noqa: RUF012
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }
