"""A small Llama from a saved checkpoint, loaded by transformers and by hf_rocm, and models with shuffled weights."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_rocm
from hf_rocm import options
from hf_rocm.ops.aiter import detect
from hf_rocm.weights import shuffled_copy
from tests.aiter import recorded
from tests.aiter.machine import pretend
from tests.weights import models, shuffling


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The checkpoint of `models.build()` that this release of transformers saves."""
    folder = tmp_path_factory.mktemp("checkpoint")
    models.build().save_pretrained(folder)
    return folder


@pytest.fixture
def stock(checkpoint):
    """The stock model. Its weights remain in a mapped file until they are written to."""
    return LlamaForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture
def fresh(checkpoint):
    """The checkpoint loaded by hf_rocm. The first call to this model fuses the weights."""
    return hf_rocm.from_pretrained(checkpoint, force=True).eval()


@pytest.fixture
def model(fresh):
    """The model of `fresh` with fused weights."""
    assert models.live(fresh) == models.GROUPS
    return fresh


@pytest.fixture
def machine(monkeypatch):
    """Returns machine(arch, release, threshold), which simulates a GPU and a recorded release of aiter on the CPU."""

    def use(arch="gfx942", release=shuffling.NEWEST, threshold=shuffling.ROWS):
        fake_release = recorded.release(release)
        monkeypatch.setattr(detect, "load", lambda: fake_release)
        pretend(monkeypatch, arch)
        changed = options.override(probe=False, preshuffle_threshold=threshold)
        changed.__enter__()
        entered.append(changed)

    entered: list = []
    yield use
    for entry in reversed(entered):
        entry.__exit__(None, None, None)
    options._forget_choices()
    shuffled_copy.unwatch()


@pytest.fixture(params=[0, shuffling.ROWS], ids=["in place", "a copy"])
def shuffled_model(request, machine):
    """A model in which the weights of all linear layers are shuffled, in place or as copies."""
    machine(threshold=request.param)
    model = shuffling.prepared()
    assert len(shuffling.account(model)["shuffled"]) == shuffling.GEMMS and not shuffling.account(model)["skipped"]
    return model
