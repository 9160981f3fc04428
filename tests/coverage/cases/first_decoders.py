"""Text decoders whose MLPs have no gate: with learned positions, ALiBi or rotary embeddings."""

from tests.coverage.case import Case
from tests.coverage.cases.shapes import FALCON, GPT2, NO_DROPOUT

BLOOM = {"vocab_size": 131, "hidden_size": 64, "n_layer": 2, "n_head": 4, "pad_token_id": 0, "bos_token_id": 1}
BLOOM |= {"eos_token_id": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
OPT = {**FALCON, "ffn_dim": 96, "dropout": 0.0, "word_embed_proj_dim": 32, "activation_function": "relu"}

BIOGPT = {**FALCON, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

FIRST_DECODERS = [
    Case("biogpt", "BioGptForCausalLM", "BioGptConfig", BIOGPT, ("BioGptAttention",)),
    Case("opt", "OPTForCausalLM", "OPTConfig", OPT, ("OPTAttention",)),
    Case("bloom", "BloomForCausalLM", "BloomConfig", BLOOM, ("BloomAttention",)),
    Case("gptj", "GPTJForCausalLM", "GPTJConfig", {**GPT2, **NO_DROPOUT, "rotary_dim": 8}, ("GPTJAttention",)),
    Case(
        "codegen",
        "CodeGenForCausalLM",
        "CodeGenConfig",
        {**GPT2, **NO_DROPOUT, "rotary_dim": 8},
        ("CodeGenAttention",),
    ),
    Case(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {**GPT2, **NO_DROPOUT, "multi_query": True},
        ("GPTBigCodeAttention",),
        since="4.54",
    ),
    Case(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {**GPT2, **NO_DROPOUT, "multi_query": False},
        ("GPTBigCodeAttention",),
        since="4.54",
        variant="one key head per query head",
    ),
    Case(
        "persimmon",
        "PersimmonForCausalLM",
        "PersimmonConfig",
        {**FALCON, "qk_layernorm": True, "partial_rotary_factor": 0.5, "hidden_dropout": 0.0},
        ("PersimmonAttention",),
    ),
]
