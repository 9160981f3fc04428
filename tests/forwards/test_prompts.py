"""Prompts of `generate` are recorded and replayed, and every call returns what stock returns."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import transformers

import hf_rocm
from hf_rocm import options
from hf_rocm.forwards import prompts, runner
from hf_rocm.forwards.state import SETTINGS, known
from hf_rocm.generation import recorder
from tests.forwards.conftest import counted, logits_of, reasons, recorder_with
from tests.forwards.families import make as make_encoder
from tests.generation import faults
from tests.generation.conftest import KINDS, alike_from_threads, assistant_of, generate, make, prompt
from tests.releases import RELEASE, in_the_newest

STATIC = [kind for kind in KINDS if kind != "mixtral" or RELEASE.major >= 5]
# The last call is replayed without a comparison.
CALLS = 6


@pytest.mark.parametrize("kind", STATIC)
def test_a_length_is_recorded_at_its_second_prompt(kind, decoders):
    prepared, twin = decoders(kind)
    progress = []
    for seed in range(CALLS):
        inputs = prompt(length=20, seed=seed)
        assert torch.equal(logits_of(prepared, inputs), logits_of(twin, inputs))
        progress.append((*counted(prepared), known(prepared).compared))
    # the first call runs uncaptured, the second is recorded, three are compared, and the last is replayed
    assert progress == [(0, 0, 0), (1, 0, 0), (1, 0, 0), (1, 1, 1), (1, 2, 2), (1, 3, 2)]


@pytest.mark.parametrize("kind", STATIC)
def test_prompts_of_many_lengths_share_a_recording(kind, decoders):
    prepared, _ = decoders(kind)
    stock = make(kind)
    for seed, length in enumerate((20, 21, 5, 31, 18, 22, 9, 30, 64, 63, 50, 49, 33, 39, 58)):
        inputs = prompt(length=length, seed=seed)
        assert torch.equal(generate(prepared, inputs), generate(stock, inputs)), length
    # the first prompt in each bucket runs uncaptured; 64 tokens are exactly a bucket
    assert counted(prepared) == (2, 8) and known(prepared).padded == {32: 7, 64: 5}


def test_long_prompts_of_a_sliding_window_keep_the_last_keys(decoders):
    """The padding is longer than the window, and must not displace the keys of the prompt."""
    prepared, _ = decoders("mistral", sliding_window=4)
    stock = make("mistral", sliding_window=4)
    for seed, length in enumerate((40, 41, 44, 36, 50, 34)):
        inputs = prompt(length=length, seed=seed)
        assert torch.equal(generate(prepared, inputs, new=30), generate(stock, inputs, new=30)), length
    assert known(prepared).padded == {64: 5}


def test_left_padding_is_recorded_by_its_exact_length(decoders):
    """The recording depends on whether a token is masked, which the host reads."""
    prepared, twin = decoders()
    for seed in range(14):
        inputs = prompt(length=20 + seed % 2, seed=seed, padded=3)
        assert torch.equal(logits_of(prepared, inputs), logits_of(twin, inputs))
    assert counted(prepared) == (2, 8) and not known(prepared).padded
    for seed in range(6):
        inputs = prompt(length=20, seed=seed)
        assert torch.equal(logits_of(prepared, inputs), logits_of(twin, inputs))
    assert counted(prepared)[0] == 3


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 3},
        {"do_sample": True, "seed": 3},
        {"num_return_sequences": 2, "do_sample": True, "seed": 4},
        {"repetition_penalty": 1.3},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_loops_without_drafts_replay_prompts(arguments, decoders):
    prepared, _ = decoders()
    stock = make("llama")
    for seed in range(CALLS):
        inputs = prompt(length=20, seed=seed)
        assert torch.equal(generate(prepared, inputs, **arguments), generate(stock, inputs, **arguments))
    assert counted(prepared) == (1, 3)


def test_prompts_with_drafts_run_uncaptured_but_not_those_of_the_assistant(decoders):
    prepared, _ = decoders()
    stock = make("llama")
    assistant = hf_rocm.prepare(assistant_of(stock), force=True)
    for seed in range(CALLS):
        inputs = prompt(1, length=20, seed=seed)
        expected = generate(stock, inputs)
        assert torch.equal(generate(prepared, inputs, assistant_model=assistant), expected)
        assert torch.equal(generate(prepared, inputs, prompt_lookup_num_tokens=3), expected)
    assert "the prompt returns more than the logits of its last token" in reasons(prepared)
    assert counted(assistant)[1] == 3


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_cache_of_the_user_is_filled(kind, decoders):
    prepared, twin = decoders(kind)
    for seed in range(CALLS):
        inputs, caches = prompt(length=20, seed=seed), [transformers.DynamicCache() for _ in range(2)]
        for turn in range(2):
            results = [generate(m, inputs, past_key_values=c) for m, c in zip((prepared, twin), caches, strict=True)]
            assert torch.equal(*results) and caches[0].get_seq_length() == caches[1].get_seq_length(), turn
            # The second turn has keys already, so it is no prompt.
            tokens = torch.cat((results[0], inputs["input_ids"][:, :5]), 1)
            inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    assert counted(prepared) == (1, 3)


def test_embeddings_run_uncaptured(decoders):
    prepared, twin = decoders()
    for seed in range(4):
        inputs = prompt(length=20, seed=seed)
        inputs["inputs_embeds"] = prepared.get_input_embeddings()(inputs.pop("input_ids")).detach()
        assert torch.equal(logits_of(prepared, inputs), logits_of(twin, inputs))
    assert counted(prepared) == (0, 0) and reasons(prepared) == ["the prompt has the argument inputs_embeds"]


def test_short_and_long_prompts_run_uncaptured(decoders, monkeypatch):
    monkeypatch.setattr(prompts, "_MOST_TOKENS", 30)
    prepared, _ = decoders()
    stock = make("llama")
    for length in (1, 16):
        for seed in range(3):
            inputs = prompt(length=length, seed=seed)
            assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
    assert counted(prepared) == (0, 0)
    assert reasons(prepared) == ["prompts of more than 30 tokens are not recorded"]


def test_padding_is_an_option(decoders):
    prepared, twin = decoders()
    with options.override(pad_tokens=0):
        for seed, length in enumerate((20, 21, 22, 23, 20, 20, 20)):
            inputs = prompt(length=length, seed=seed)
            assert torch.equal(logits_of(prepared, inputs), logits_of(twin, inputs))
    assert counted(prepared) == (1, 1) and not known(prepared).padded


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "the angles of its rotary embeddings depend on the length of the prompt",
        ),
        ("gemma3", {"use_bidirectional_attention": True}, "the model's attention is not causal"),
    ],
)
def test_prompts_whose_results_depend_on_the_padding_are_not_padded(kind, changes, reason, recorded_on_cpu):
    if RELEASE.major < 5 and kind == "gemma3":
        pytest.skip("this release has no such setting")
    assert prompts._refuses_padding(make(kind, **changes)) == reason
    assert prompts._refuses_padding(make(kind)) is None


def test_changed_models_are_followed(decoders):
    prepared, twin = decoders()
    stock = make("llama")

    def check(seeds):
        for seed in seeds:
            inputs = prompt(length=20, seed=seed)
            assert torch.equal(logits_of(prepared, inputs), logits_of(twin, inputs))

    check(range(CALLS))
    assert counted(prepared) == (1, 3)
    with torch.no_grad():
        for model in (prepared, twin, stock):
            model.lm_head.weight.mul_(-1.5)
    check(range(2))
    # The recording reads the weights themselves.
    assert counted(prepared) == (1, 5)
    for model in (prepared, twin):
        model.to(torch.bfloat16)
    check(range(CALLS))
    assert counted(prepared)[0] == 2
    for model in (prepared, twin):
        model.model.layers[0].register_forward_hook(lambda module, args, output: output)
    replayed = counted(prepared)[1]
    check(range(3))
    assert counted(prepared)[1] == replayed


def test_a_wrong_replay_is_found(decoders, monkeypatch):
    monkeypatch.setitem(recorder.factories, "cpu", recorder_with(faults.gemm_dropped, first=2))
    prepared, twin = decoders()
    with options.override(graphs=options.Switch.AUTO):
        for seed in range(CALLS):
            inputs = prompt(length=20, seed=seed)
            assert torch.equal(generate(prepared, inputs, new=1), generate(twin, inputs, new=1))
    assert known(prepared).disabled.startswith("a replayed forward differed from the forward itself by up to ")


def test_padding_that_changes_results_is_found(decoders, monkeypatch):
    continued = prompts._continued
    monkeypatch.setattr(prompts, "_continued", lambda positions, further: continued(positions + 1, further))
    monkeypatch.setattr(prompts, "_is_plain", lambda given: True)
    prepared, _ = decoders("llama", attention_bias=True)
    with torch.no_grad():
        # A token at a different position has a different key.
        for seed, length in enumerate((20, 21, 22, 23, 24)):
            inputs = prompt(length=length, seed=seed)
            assert torch.equal(generate(prepared, inputs), generate(make("llama", attention_bias=True), inputs))
    assert "a padded forward differed from the unpadded one by" in known(prepared).unpadded


def test_a_call_that_is_repeated_runs_its_prompt_uncaptured(decoders, monkeypatch):
    """A wrong replay of a step repeats the call uncaptured, including its prompt."""
    prepared, _ = decoders()
    stock = make("llama")
    for seed in range(CALLS):
        generate(prepared, prompt(length=20, seed=seed), new=2)
    runs = []
    monkeypatch.setattr(prompts, "run", lambda *arguments: runs.append(1) or runner.NOT_RUN)
    monkeypatch.setitem(recorder.factories, "cpu", faults.recorder_with(faults.gemm_dropped, first=4))
    inputs = prompt(length=20, seed=9)
    assert torch.equal(generate(prepared, inputs, new=30), generate(stock, inputs, new=30))
    assert len(runs) == 1 and hf_rocm.explain(prepared).decoding


def test_threads_share_recordings(decoders):
    prepared, _ = decoders()
    stock = make("llama")
    inputs = [prompt(length=length, seed=length) for length in (20, 21, 22)]
    expected = [generate(stock, one) for one in inputs]
    for _ in range(3):
        assert alike_from_threads(lambda one: generate(prepared, one), inputs, expected)
    assert counted(prepared)[1]


def test_explain_lists_recorded_prompts(decoders):
    prepared, _ = decoders()
    assert hf_rocm.explain(prepared).forwards == ("prompts are recorded and replayed",)
    for seed in range(CALLS):
        generate(prepared, prompt(length=20, seed=seed))
    lines = hf_rocm.explain(prepared).forwards
    assert lines[:2] == ("prompts are recorded and replayed", "recorded prompts: 1, replayed prompts: 3")
    assert "2 of the replayed prompts were compared again with uncaptured prompts" in lines
    hf_rocm.prepare(prepared, force=True, graphs=False)
    assert hf_rocm.explain(prepared).forwards == ()


def test_copies_have_their_own_recordings_and_restore_frees_them(decoders):
    prepared, _ = decoders()
    stock = make("llama")
    for seed in range(4):
        generate(prepared, prompt(length=20, seed=seed))
    again = copy.deepcopy(prepared)
    assert known(again) is None
    for seed in range(CALLS):
        inputs = prompt(length=20, seed=seed)
        assert torch.equal(generate(again, inputs), generate(stock, inputs))
    assert counted(again)[1]
    for model in (prepared, again):
        hf_rocm.restore(model)
        assert known(model) is None and SETTINGS not in model.__dict__


def test_recordings_are_freed_with_their_model(decoders):
    prepared, _ = decoders()
    for seed in range(CALLS):
        generate(prepared, prompt(length=20, seed=seed))
    references = weakref.ref(prepared), weakref.ref(known(prepared)), weakref.ref(next(prepared.parameters()))
    del prepared
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_prompts_with_images_run_uncaptured(recorded_on_cpu):
    text = make("llama").config
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**make_encoder("siglip").config.to_dict()),
        text_config=text,
        image_token_id=5,
        vision_feature_select_strategy="full",
    )
    torch.manual_seed(0)
    stock = transformers.LlavaForConditionalGeneration(config).eval()
    prepared = hf_rocm.prepare(copy.deepcopy(stock), force=True)
    size = stock.config.vision_config.image_size
    patches = (size // stock.config.vision_config.patch_size) ** 2
    for seed in range(CALLS):
        inputs = prompt(1, length=20, seed=seed)
        if seed % 2:
            inputs["input_ids"][inputs["input_ids"] == 5] = 6
        else:
            image = torch.full((1, patches), 5)
            inputs = {"input_ids": torch.cat((image, inputs["input_ids"].clamp(min=6)), 1)}
            inputs |= {"attention_mask": torch.ones_like(inputs["input_ids"])}
            inputs["pixel_values"] = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
    # The second name is that of images that transformers has encoded before the prompt.
    (reason,) = reasons(prepared)
    assert counted(prepared)[0] and reason.endswith(("pixel_values", "mm_encoder_outputs"))


@in_the_newest
def test_a_prompt_that_takes_longer_if_padded_is_not_padded(decoders, monkeypatch):
    prepared, _ = decoders()
    stock = make("llama")
    monkeypatch.setattr(runner, "_is_timed", lambda device: True)
    # The unpadded call is timed first, then two replays.
    times = iter([1.0, 2.0, 2.0] * 9)
    monkeypatch.setattr(runner, "_timed", lambda device, run: (run(), next(times)))
    for seed, length in enumerate((20, 21, 22, 23, 24, 25, 26, 27)):
        inputs = prompt(length=length, seed=seed)
        assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
    assert known(prepared).slower == {32: 1} and known(prepared).padded == {32: 4}


def test_the_memory_of_keys_is_shared_by_recordings(decoders):
    """Memory for 20 and for 24 tokens is rounded up to the same size."""
    prepared, twin = decoders()
    with options.override(pad_tokens=0):
        for seed in range(14):
            inputs = prompt(length=20 + 4 * (seed % 2), seed=seed)
            assert torch.equal(generate(prepared, inputs, new=9), generate(twin, inputs, new=9)), seed
    recordings = [recording for recording, _ in known(prepared)._recordings.values()]
    assert len(recordings) == 2 and counted(prepared)[1] == 8
    first, second = ([tensor.data_ptr() for tensor in recording.tensors] for recording in recordings)
    assert first[0] != second[0] and first[1:] == second[1:]


def test_models_with_recurrent_states_run_their_prompts_uncaptured(decoders):
    if RELEASE.major < 5:
        pytest.skip("recurrent states have a different layout")
    prepared, _ = decoders("qwen3_next")
    stock = make("qwen3_next")
    for seed in range(4):
        inputs = prompt(length=20, seed=seed)
        assert torch.equal(generate(prepared, inputs), generate(stock, inputs))
        with torch.no_grad():
            assert torch.allclose(*(m(**inputs, logits_to_keep=1).logits for m in (prepared, stock)), atol=1e-3)
    assert counted(prepared) == (0, 0)
    assert reasons(prepared) == ["a prompt begins the states of its recurrent layers"]


@in_the_newest
def test_small_logits_are_compared_relative_to_their_magnitude(decoders):
    prepared, _ = decoders()
    logits = 0.1 * torch.randn(2, 1, 61, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    assert prompts.PADDING.differs(prepared, [logits], [logits.roll(1, -1)]) is not None
    assert prompts.PADDING.differs(prepared, [logits * 1.004], [logits]) is None


def test_memory_stays_within_the_limit(decoders):
    prepared, _ = decoders()
    with options.override(graphs_memory="64KiB", pad_tokens=0):
        for length in range(3, 30):
            for seed in range(3):
                generate(prepared, prompt(length=length, seed=seed), new=1)
            recordings = [recording for recording, _ in known(prepared)._recordings.values()]
            shared = {id(buffer): buffer.tensor.nbytes for one in recordings for buffer in one._buffers}
            own = sum(recording.nbytes for recording in recordings)
            assert own + sum(shared.values()) <= known(prepared).summary()[1] <= 2**16
    assert counted(prepared)[0] > 20 and len(recordings) > 2
