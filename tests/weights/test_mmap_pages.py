"""Distinguishing mapped files from ordinary memory, and releasing their pages without losing values."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_rocm.weights import mmap_pages

pytestmark = pytest.mark.skipif(not Path(mmap_pages._PAGEMAP).exists(), reason="no pagemap on this system")

# Bytes of the tensor.
SIZE = 64 * 2**20


@pytest.fixture
def weight(tmp_path):
    """A tensor in a mapped file, as transformers loads weights on the CPU."""
    save_file({"weight": torch.arange(SIZE // 4, dtype=torch.float32)}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        return file.get_slice("weight")[:]


def resident() -> int:
    """Bytes of mapped files that are resident in this process."""
    words = Path("/proc/self/status").read_text().split("RssFile:")[1].split()
    return int(words[0]) * 1024


def test_a_file_is_mapped_until_it_is_written_to(weight):
    assert mmap_pages.is_mapped(weight)
    weight.sum()
    assert mmap_pages.is_mapped(weight)
    weight[0] = 1
    assert not mmap_pages.is_mapped(weight)


@pytest.mark.parametrize(
    "tensor", [torch.randn(3), torch.randn(SIZE // 4), torch.zeros(0), torch.ones(9, device="meta")]
)
def test_ordinary_memory_is_not_mapped(tensor):
    assert not mmap_pages.is_mapped(tensor)
    kept = tensor.clone()
    mmap_pages.release_pages(tensor)
    assert tensor.is_meta or torch.equal(tensor, kept)


def test_read_pages_are_released_and_can_be_read_again(weight):
    expected = weight.clone()
    before = resident()
    mmap_pages.release_pages(weight)
    assert before - resident() > SIZE * 0.9
    assert torch.equal(weight, expected)


def test_written_pages_are_kept(weight):
    expected = weight.clone()
    for row in (0, SIZE // 8, SIZE // 4 - 1):
        weight[row] = expected[row] = -5.0
        mmap_pages.release_pages(weight)
        assert torch.equal(weight, expected)


def test_a_tensor_within_one_page_is_kept(weight):
    mmap_pages.release_pages(weight[:7])
    assert weight[:7].tolist() == list(range(7))


@pytest.mark.parametrize("text", [None, "short"])
def test_without_a_page_map_nothing_counts_as_mapped(weight, monkeypatch, tmp_path, text):
    if text:
        (tmp_path / "pagemap").write_text(text)
    monkeypatch.setattr(mmap_pages, "_PAGEMAP", str(tmp_path / "pagemap"))
    assert not mmap_pages.is_mapped(weight)
    mmap_pages.release_pages(weight)
    assert weight[-1] == SIZE // 4 - 1


def test_without_madvise_nothing_is_released(weight, monkeypatch):
    mmap_pages._madvise.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    try:
        weight.sum()
        before = resident()
        mmap_pages.release_pages(weight)
        assert before - resident() < SIZE / 2
    finally:
        mmap_pages._madvise.cache_clear()
