"""The number of kernels per layer in a recorded decode step: changes to the fused kernels must not increase it."""

from __future__ import annotations

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm import options
from hf_rocm.tools.bench.profile import _work

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 4, "intermediate_size": 512}
# Every entry: model, config, settings, kernels per layer now, kernels per layer before norms and routers were fused.
KINDS = {
    "qwen3": ("Qwen3", "Qwen3Config", {}, 6, 11),
    "gemma3": ("Gemma3", "Gemma3TextConfig", {"sliding_window": 128}, 8, 15),
    "gpt_oss": ("GptOss", "GptOssConfig", {**EXPERTS, "num_local_experts": 16, "sliding_window": 128}, 9, 30),
    "qwen3_moe": (
        "Qwen3Moe",
        "Qwen3MoeConfig",
        {**EXPERTS, "num_experts": 32, "moe_intermediate_size": 512, "norm_topk_prob": True},
        9,
        19,
    ),
}
# Numbers of layers; kernels that run once per step cancel out in the difference.
FEW, MANY = 2, 6
# The measured step. If its replay is compared, more kernels run, so the test uses the run with the fewest.
AT = 11
RUNS = 3


class _OneStep:
    """A logits processor that profiles the kernels between two of its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.recorder = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls in (AT, AT + 1):
            torch.cuda.synchronize()
            (self.recorder.start if self.calls == AT else self.recorder.stop)()
        return scores


def kernels(kind, layers):
    model, config, settings, *_ = KINDS[kind]
    torch.manual_seed(0)
    depth = {"num_hidden_layers": layers}
    # Models of any depth need both layer types: each has its own mask and angles.
    if "sliding_window" in settings:
        depth["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    configuration = getattr(transformers, config)(**{**SIZES, **settings, **depth})
    stock = getattr(transformers, f"{model}ForCausalLM")(configuration).eval().to("cuda", torch.bfloat16)
    prepared = hf_rocm.prepare(stock, force=True)
    ids = torch.randint(1, 500, (1, 200), device="cuda")
    counts = []
    for _ in range(RUNS):
        step = _OneStep()
        with torch.no_grad():
            prepared.generate(ids, max_new_tokens=AT + 4, do_sample=False, logits_processor=[step])
        counts.append([work.name for work in _work(step.recorder)])
    return min(counts, key=len)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_runs_the_expected_number_of_kernels(kind):
    *_, expected, before = KINDS[kind]
    with options.override(probe=False):
        few, many = kernels(kind, FEW), kernels(kind, MANY)
    names = {name: (many.count(name) - few.count(name)) / (MANY - FEW) for name in sorted(set(many))}
    assert (len(many) - len(few)) / (MANY - FEW) == expected, {name: count for name, count in names.items() if count}
    assert 3 * expected <= 2 * before, "the number of kernels is not lower by at least one third"
