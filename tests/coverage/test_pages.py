"""With a paged cache, layers call the selected attention as stock layers do.

hf_rocm runs the rest of each layer.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import modeling_flash_attention_utils as utils

from hf_rocm import ops
from hf_rocm.layers.fallback_reasons import noted
from hf_rocm.overlay import catalog
from tests.coverage.case import params
from tests.coverage.cases import CASES
from tests.coverage.routing import choosing
from tests.releases import RELEASE

pytestmark = pytest.mark.skipif(
    RELEASE.release < (5, 9), reason="not run: continuous batching in this release does not use flash attention"
)

SERVED = {
    "apertus",
    "arcee",
    "cohere",
    "cwm",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "flex_olmo",
    "gemma",
    "gemma2",
    "gemma3",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "granitemoe",
    "helium",
    "hunyuan_v1_dense",
    "hyperclovax",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "vaultgemma",
}
PASSING = {
    model
    for directory in catalog.load().directories
    for model, file in directory.files.items()
    if "pages=True" in file.read_text(encoding="utf-8")
}
PAGED = [case for case in CASES if case.overlay in SERVED and case.kind == "text"]


# Arguments that only stock layers or only hf_rocm's layers pass to the attention function, which reads none of them.
UNREAD = {"output_router_logits", "use_cache"}


@pytest.fixture
def calls(monkeypatch):
    """Replace the functions that transformers imports from flash-attn. Returns their calls: (tensors, arguments)."""
    calls = []

    def attend(query, key, value, arguments):
        calls.append(((query, key, value), arguments))
        heads = [part.transpose(1, 2) for part in (query, key, value)]
        heads[1:] = [part.repeat_interleave(heads[0].shape[1] // part.shape[1], dim=1) for part in heads[1:]]
        scale = arguments["softmax_scale"]
        return nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=scale).transpose(1, 2)

    def arguments_of(**arguments):
        return {"arguments": arguments}

    processing = (arguments_of, arguments_of) if hasattr(utils, "_process_with_kvcache_kwargs_fn") else arguments_of
    imported = (attend, None, None, None, None), processing
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *args, **kwargs: imported)
    return calls


def run(model, calls, cache):
    del calls[:]
    own = model.config._attn_implementation
    model.config._attn_implementation = "flash_attention_2"
    try:
        with torch.inference_mode():
            ids = torch.arange(3, 17).view(1, 14)
            logits = model(input_ids=ids, position_ids=torch.arange(14)[None], use_cache=False, cache=cache).logits
    finally:
        model.config._attn_implementation = own
    return logits, list(calls)


def test_every_listed_overlay_has_a_case():
    assert {case.overlay for case in PAGED} == SERVED


@pytest.mark.parametrize("model", sorted(SERVED | PASSING))
def test_an_overlay_is_listed_if_and_only_if_it_passes_pages(model):
    assert (model in SERVED) is (model in PASSING), f"{__file__}: SERVED"


@params(PAGED)
def test_attention_is_called_as_stock_calls_it(case, trio, calls):
    prepared, stock, _ = trio()
    # A placeholder: only transformers' own attention for a paged cache reads it.
    cache = SimpleNamespace()
    with choosing(case) as chosen:
        expected, expected_calls = run(stock, calls, cache)
    with choosing(case, chosen), ops.recording() as routes:
        actual, actual_calls = run(prepared, calls, cache)

    assert len(actual_calls) == len(expected_calls) > 0
    for (tensors, arguments), (stocks, stocks_arguments) in zip(actual_calls, expected_calls, strict=True):
        assert (arguments.keys() ^ stocks_arguments.keys()) <= UNREAD
        assert all(same(value, stocks_arguments.get(name)) for name, value in arguments.items() if name not in UNREAD)
        for tensor, other in zip(tensors, stocks, strict=True):
            torch.testing.assert_close(tensor, other, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)

    layers = [module for module in prepared.modules() if type(module).__name__ in case.classes()]
    assert layers and {noted(layer) for layer in layers} == {None}
    ran = Counter(route.operation for route in routes)
    assert not ran.keys() & {"attention", "decode_attention", "varlen_attention"}
    assert ran["linear"] or ran["rope"] or ran["rms_norm"] or ran["act_and_mul"]


def same(one, other):
    return torch.equal(one, other) if torch.is_tensor(one) else one is other or one == other
