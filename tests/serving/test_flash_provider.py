"""Without flash-attn, hf_rocm computes `flash_attention_2` for prepared models. Continuous batching may use it."""

from __future__ import annotations

import copy
import gc
import importlib
from importlib.util import find_spec

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm import ops, patches
from hf_rocm.errors import OptionError
from hf_rocm.generation import flash_provider
from hf_rocm.layers import flash_functions
from hf_rocm.layers.fallback_reasons import noted
from tests.generation.conftest import make
from tests.serving import batching
from tests.serving.batching import NEW, RELEASE, needs_batching, one_by_one, prompts

NAME = flash_provider.NAME
HAS_INTERFACE = RELEASE.release >= (5, 9)

pytestmark = [
    needs_batching,
    pytest.mark.skipif(find_spec("flash_attn") is not None, reason="not run: flash-attn is installed and is used"),
]
served = pytest.mark.skipif(not HAS_INTERFACE, reason="not run: this release has no paged flash attention")

newer = pytest.mark.skipif(
    RELEASE.release < (5, 19), reason="not run: continuous batching in this release lacks these settings"
)

# The tokens of gemma2, gpt_oss and mistral reveal a wrong window, softcap or sink.
KINDS = {
    "llama": {},
    "qwen3": {},
    "gemma2": {
        # Stock's sdpa ignores the softcap, or refuses it from 5.23 on.
        "attn_implementation": "eager",
        "sliding_window": 8,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {"attn_implementation": "eager", "sliding_window": 8},
    "mistral": {"sliding_window": 8},
}


def batch(model, **settings):
    from transformers.generation import ContinuousBatchingConfig

    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    settings = ContinuousBatchingConfig(**{"num_blocks": 16, "max_batch_tokens": 32, **settings})
    results = model.generate_batch(
        [list(prompt) for prompt in prompts()],
        generation_config=config,
        continuous_batching_config=settings,
        progress_bar=False,
    ).values()
    tokens = {tuple(result.prompt_ids): list(result.generated_tokens) for result in results}
    return [tokens[tuple(prompt)] for prompt in prompts()]


def attention_operations(routes):
    return {route.operation for route in routes if route.operation.endswith("attention")}


@served
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_uses_flash_attention_and_returns_the_same_tokens_as_stock(kind):
    model = make(kind, **KINDS[kind])
    own = model.config._attn_implementation
    expected = one_by_one(model, prompts())
    assert all(len(set(tokens)) > NEW / 3 for tokens in expected)
    hf_rocm.prepare(model, force=True)
    if kind in ("gemma2", "mistral") and len(flash_provider._names()) > 1:
        assert {"gemma2": "softcap", "mistral": "window"}[kind] in flash_provider.batches_refused(model)
        return
    with ops.recording() as routes:
        assert batch(model) == expected
    assert attention_operations(routes) == {"varlen_attention"}
    layers = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    # The attention layers run in their overlays.
    assert {noted(layer) for layer in layers} == {None}
    assert kind == "gpt_oss" or "rope" in {route.operation for route in routes}
    assert model.config._attn_implementation == own
    assert f"continuous batching runs {NAME!r}, computed by hf_rocm" in hf_rocm.explain(model).details()


@served
def test_a_model_whose_implementation_is_fixed_is_not_switched():
    config = transformers.GPTNeoConfig(
        vocab_size=61, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global"], 2]],
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = hf_rocm.prepare(transformers.GPTNeoForCausalLM(config).eval(), force=True)
    reason = "transformers can't change the attention implementation of GPTNeoForCausalLM"
    assert flash_provider.batches_refused(model) == reason
    assert flash_provider.switch(model) is None
    with ops.recording() as routes:
        batch(model)
    assert attention_operations(routes) == set()
    assert f"continuous batching runs as in stock transformers: {reason}" in hf_rocm.explain(model).decoding


def test_explain_omits_batching_for_models_without_a_paged_cache():
    """transformers has no paged cache for encoder-decoder models or for linear attention."""
    config = transformers.BartConfig(
        vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
    )  # fmt: skip
    for stock in (transformers.BartForConditionalGeneration(config).eval(), make("qwen3_next")):
        decoding = hf_rocm.explain(hf_rocm.prepare(stock, force=True)).decoding
        assert decoding and not any("batch" in line for line in decoding)


@served
@pytest.mark.parametrize("page_size", [256, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_single_token_steps_run_paged_attention(kind, page_size, page_tables_on_cpu):
    """A window of 8 keys occupies part of a page of 256 keys, or two pages of 5 keys without filling the second."""
    model = make(kind, **KINDS[kind])
    expected = one_by_one(model, prompts())
    hf_rocm.prepare(model, force=True)
    if flash_provider.batches_refused(model) is not None:
        return
    with ops.recording() as routes:
        assert batch(model, page_size=page_size, num_blocks=4096 // page_size) == expected
    assert attention_operations(routes) == {"varlen_attention", "paged_attention"}


@newer
@pytest.mark.parametrize(
    ("longest", "settings", "columns"),
    [(8192, {}, 32), (20000, {}, 80), (131072, {}, 128), (131072, {"max_blocks_per_request": 8}, 8)],
)
def test_page_tables_are_sized_for_requests_of_unknown_lengths(longest, settings, columns, page_tables_on_cpu):
    """transformers' default is 32 pages per request, even if the model supports longer requests."""
    from transformers.generation import ContinuousBatchingConfig

    model = hf_rocm.prepare(make("llama", max_position_embeddings=longest), force=True)
    config = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32, **settings)
    manager = model.init_continuous_batching(continuous_batching_config=config)
    manager.start()
    try:
        assert manager.continuous_batching_config.max_blocks_per_request == columns
    finally:
        manager.stop(block=True)
    assert model.config._attn_implementation == "sdpa"


@newer
def test_explain_after_a_batch():
    """With flash attention, attention layers run in their overlays. With sdpa, they run their stock forward."""
    model = hf_rocm.prepare(make("llama"), force=True)
    stayed = "stock at the last call × 2: the call has a paged cache (continuous batching)"
    batch(model)
    assert "stock at the last call" not in hf_rocm.explain(model).details()
    batching.batch(model, prompts())
    assert stayed in hf_rocm.explain(model).details()
    one_by_one(model, prompts()[:1])
    assert "stock at the last call" not in hf_rocm.explain(model).details()


@served
def test_batches_run_sdpa_if_the_user_declines_flash_attention():
    model = hf_rocm.prepare(make("llama"), force=True)
    settings = {"auto_switch_to_flash": False} if len(flash_provider._names()) == 1 else {}
    if not settings:
        model.set_attn_implementation("paged|sdpa")
    with ops.recording() as routes:
        batch(model, **settings)
    assert not attention_operations(routes)


@served
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_generate_and_padded_forwards(kind):
    """`generate` with one prompt runs dense attention, and a left-padded batch runs packed attention."""
    model = make(kind, **KINDS[kind])
    ids = torch.tensor([[0, 0, *range(5, 20)], list(range(7, 24))])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
    tokens = one_by_one(model, prompts())
    hf_rocm.prepare(model, force=True)
    model.set_attn_implementation(NAME)
    with torch.no_grad(), ops.recording() as routes:
        actual = model(input_ids=ids, attention_mask=mask).logits
        assert one_by_one(model, prompts()) == tokens
    assert attention_operations(routes) == {"attention", "varlen_attention"}
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)


@served
def test_other_models_are_refused_as_in_stock_and_restore_undoes_all_changes():
    gc.collect()
    patches.sweep()
    model, other = make("llama"), make("llama")
    modules = [importlib.import_module(name) for name in (flash_provider._UTILS, flash_provider._MODELING)]
    stock = [module.lazy_import_flash_attention for module in modules]
    hf_rocm.prepare(model, force=True)
    model.set_attn_implementation(NAME)
    with pytest.raises(ImportError, match="FlashAttention2"):
        other.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="nonsense"):
        model.set_attn_implementation("nonsense")
    expected = one_by_one(model, prompts())
    hf_rocm.restore(model)
    assert model.config._attn_implementation == "sdpa"
    assert [module.lazy_import_flash_attention for module in modules] == stock
    assert not patches.of(model) and not any(name.startswith("_hf_rocm_flash") for name in model.__dict__)
    assert one_by_one(model, prompts()) == expected
    with pytest.raises(ImportError, match="FlashAttention2"):
        model.set_attn_implementation(NAME)


@served
def test_a_copy_keeps_flash_attention_after_the_original_is_restored():
    model = hf_rocm.prepare(make("llama"), force=True)
    model.set_attn_implementation(NAME)
    expected = one_by_one(model, prompts())
    twin = copy.deepcopy(model)
    hf_rocm.restore(model)
    assert one_by_one(twin, prompts()) == expected
    hf_rocm.restore(twin)


@served
def test_an_exception_while_the_batch_begins_leaves_the_model_as_it_was():
    model = hf_rocm.prepare(make("llama"), force=True)
    with pytest.raises(Exception, match="page_size"):
        batch(model, page_size=1)
    assert model.config._attn_implementation == "sdpa"


@served
def test_from_pretrained_accepts_the_name(tiny_checkpoint):
    """Without hf_rocm, transformers refuses this name while it builds the model."""
    expected = one_by_one(transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint), prompts())
    model = hf_rocm.from_pretrained(tiny_checkpoint, force=True, attn_implementation=NAME)
    assert model.config._attn_implementation == NAME
    assert one_by_one(model, prompts()) == expected
    with pytest.raises(ImportError, match="FlashAttention2"):
        hf_rocm.from_pretrained(tiny_checkpoint, force=False, attn_implementation=NAME)


@served
def test_auto_prepare_accepts_the_name(tiny_checkpoint):
    load = transformers.AutoModelForCausalLM.from_pretrained
    expected = one_by_one(load(tiny_checkpoint), prompts())
    hf_rocm.auto_prepare(force=True)
    try:
        model, info = load(tiny_checkpoint, attn_implementation=NAME, output_loading_info=True)
    finally:
        hf_rocm.auto_prepare(False)
    assert model.config._attn_implementation == NAME and not list(info["missing_keys"])
    assert one_by_one(model, prompts()) == expected
    with pytest.raises(ImportError, match="FlashAttention2"):
        load(tiny_checkpoint, attn_implementation=NAME)


@pytest.mark.skipif(HAS_INTERFACE, reason="not run: this release has the interface")
def test_in_older_releases_batching_stays_stock_and_the_reason_is_explained():
    model = hf_rocm.prepare(make("llama"), force=True)
    assert "5.9" in flash_provider.unavailable()
    assert flash_provider.MARK not in model.__dict__
    assert "continuous batching runs as in stock transformers" in hf_rocm.explain(model).details()


@pytest.mark.parametrize("packed", [False, True])
def test_windows_on_both_sides_equal_sdpa(packed):
    """Encoders request windows on both sides of a token, which no operation supports."""
    query, key = (torch.randn(9, 2, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    distance = (torch.arange(9) - torch.arange(9)[:, None]).abs()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(0, 1) for tensor in (query, key, key)), attn_mask=distance <= 2
    ).transpose(0, 1)
    if packed:
        ends = torch.tensor([0, 9])
        actual = flash_functions.flash_attn_varlen_func(query, key, key, ends, ends, 9, 9, window_size=(2, 2))
    else:
        actual = flash_functions.flash_attn_func(query[None], key[None], key[None], window_size=(2, 2))[0]
    torch.testing.assert_close(actual, expected)


def test_dropout_is_an_error():
    query = torch.zeros(1, 2, 1, 8)
    with pytest.raises(OptionError, match="does not support dropout"):
        flash_functions.flash_attn_func(query, query, query, dropout_p=0.1)
