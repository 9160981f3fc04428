"""Weights are copied through heap memory only on machines with a known fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import modeling_utils

import hf_rocm
from hf_rocm.known_faults import mapped_copy_fault
from hf_rocm.loading import auto, heap_copies
from hf_rocm.weights import mmap_pages

USUAL, STALLS = "6.14.0-35-generic", "7.0.0-28-generic"
# The size of the large tensor in bytes.
SIZE = 64 * 2**20

needs_pagemap = pytest.mark.skipif(not Path(mmap_pages._PAGEMAP).exists(), reason="not run: needs /proc/self/pagemap")


@pytest.fixture
def simulate_machine(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that simulates the kernel and the GPUs on which the decision depends."""

    def make(kernel: str, *gpus: str) -> None:
        monkeypatch.setattr(heap_copies, "machine", lambda: heap_copies.Machine(kernel, gpus))

    return make


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny Llama whose embedding fills whole pages."""
    config = transformers.LlamaConfig(
        vocab_size=2000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def large(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(SIZE // 4, dtype=torch.float32).reshape(-1, 1024)}, file)
    return file


def resident_file_bytes() -> int:
    """Bytes of mapped files that are resident in this process."""
    return int(Path("/proc/self/status").read_text().split("RssFile:")[1].split()[0]) * 1024


MACHINES = [
    (STALLS, ("gfx1100",), "stalls"),
    (STALLS, ("gfx942", "gfx942"), "stalls"),
    ("7.0.12-201.fc44.x86_64", ("gfx1201",), "stalls"),
    (USUAL, ("gfx1151",), "twice"),
    (USUAL, ("gfx1150",), "twice"),
    (USUAL, ("gfx1200",), None),
    (STALLS, ("gfx1151",), "stalls"),
    (USUAL, ("gfx1100",), None),
    # The weights go to the discrete GPU, not to the integrated one.
    (USUAL, ("gfx1100", "gfx1036"), None),
    ("7.0.0-280-generic", ("gfx1100",), None),
    ("7.0.0-14-generic", ("gfx1100",), None),
    ("7.0.120", ("gfx1100",), None),
    (STALLS, (), None),
    (USUAL, (), None),
]


@pytest.mark.parametrize(("kernel", "gpus", "name"), MACHINES)
def test_the_fault_depends_on_the_kernel_and_the_gpus(kernel: str, gpus: tuple[str, ...], name: str | None) -> None:
    result = mapped_copy_fault(kernel, gpus)
    assert (result and result.name) == name
    if result is not None:
        assert result.link.startswith("https://github.com/") and (kernel[:6] in result.what or gpus[0] in result.what)


@needs_pagemap
@pytest.mark.parametrize(
    ("kernel", "gpus", "copied"),
    [(STALLS, ("gfx1100",), True), (USUAL, ("gfx1151",), True), (USUAL, ("gfx1100",), False), (STALLS, (), False)],
)
@pytest.mark.parametrize("entry_point", ["from_pretrained", "auto_prepare"])
def test_loaded_weights_are_heap_copies_only_on_machines_with_the_fault(
    simulate_machine, folder, kernel, gpus, copied, entry_point
) -> None:
    simulate_machine(kernel, *gpus)
    stock = vars(modeling_utils)["safe_open"]
    if entry_point == "auto_prepare":
        auto.auto_prepare(force=True)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        finally:
            auto.auto_prepare(False)
    else:
        model = hf_rocm.from_pretrained(folder, force=True)
    assert mmap_pages.is_mapped(model.get_input_embeddings().weight) is not copied
    assert vars(modeling_utils)["safe_open"] is stock
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@needs_pagemap
def test_a_model_that_stays_stock_is_loaded_like_stock(simulate_machine, folder) -> None:
    simulate_machine(STALLS, "gfx1100")
    model = hf_rocm.from_pretrained(folder, force=False)
    assert mmap_pages.is_mapped(model.get_input_embeddings().weight)
    with auto.suspended():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert mmap_pages.is_mapped(model.get_input_embeddings().weight)


@needs_pagemap
def test_copied_pages_are_released(simulate_machine, large) -> None:
    simulate_machine(USUAL, "gfx1151")
    with heap_copies.where_needed(), modeling_utils.safe_open(large, framework="pt") as file:
        before = resident_file_bytes()
        weight = file.get_slice("weight")[...]
        assert resident_file_bytes() - before < SIZE / 2
    assert not mmap_pages.is_mapped(weight) and weight[-1, -1] == SIZE // 4 - 1


def test_whole_tensors_and_slices_are_read_as_before(simulate_machine, large) -> None:
    simulate_machine(STALLS, "gfx1100")
    with modeling_utils.safe_open(large, framework="pt") as file:
        names, shape, dtype = file.keys(), file.get_slice("weight").get_shape(), file.get_slice("weight").get_dtype()
        row, part = file.get_slice("weight")[3], file.get_slice("weight")[:, 5:9]
    with heap_copies.where_needed(), modeling_utils.safe_open(large, framework="pt", device="cpu") as file:
        result = file.get_slice("weight")
        assert (file.keys(), result.get_shape(), result.get_dtype()) == (names, shape, dtype)
        assert torch.equal(result[3], row) and torch.equal(result[:, 5:9], part)
        assert torch.equal(file.get_tensor("weight")[3], row)
        assert result[:, 5:9].is_contiguous()
        assert file.metadata() is None or isinstance(file.metadata(), dict)


def test_the_copy_is_moved_to_another_device(simulate_machine, large) -> None:
    simulate_machine(STALLS, "gfx1100")
    with heap_copies.where_needed():
        file = modeling_utils.safe_open(large, framework="pt", device="meta")
        assert file.get_slice("weight")[:2].device.type == "meta"
        # The file is read on the CPU.
        assert file._wrapped.get_slice("weight")[:2].device.type == "cpu"


def test_the_facts_describe_this_machine() -> None:
    kernel, gpus = heap_copies.machine()
    assert kernel == Path("/proc/sys/kernel/osrelease").read_text().strip()
    assert all(gfx.startswith("gfx") for gfx in gpus) and (heap_copies.fault() is None or gpus)
