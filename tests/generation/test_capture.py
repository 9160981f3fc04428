"""`random_state_in_capture` allows reading the random state during a capture, and only within the block."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import hf_rocm

STATE = torch.arange(16, dtype=torch.uint8)


class Gpu:
    """A GPU's generator that can't be read or written during a capture, as in PyTorch up to 2.9."""

    def __init__(self) -> None:
        self.capturing = False
        self.refuses = True
        self.state = STATE.clone()

    def read(self, device: object = "cuda") -> torch.Tensor:
        self._refuse()
        return self.state.clone()

    def write(self, new_state: torch.Tensor, device: object = "cuda") -> None:
        self._refuse()
        self.state = new_state.clone()

    def _refuse(self) -> None:
        if self.capturing and self.refuses:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    result = Gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: result.capturing)
    for module in (torch.cuda, torch.cuda.random):
        monkeypatch.setattr(module, "get_rng_state", result.read)
        monkeypatch.setattr(module, "set_rng_state", result.write)
    return result


def preserve_random_state() -> None:
    """Read and write the random state, as Dynamo does around a compilation. A changed state is written, so that the
    tests can detect the write."""
    state = torch.cuda.get_rng_state()
    torch.cuda.random.set_rng_state(state + 1)


def test_without_the_block_a_capture_fails(gpu: Gpu) -> None:
    gpu.capturing = True
    with nullcontext(), pytest.raises(RuntimeError, match="during CUDA graph capture"):
        preserve_random_state()


def test_within_the_block_reads_return_the_initial_state_and_writes_are_ignored(gpu: Gpu) -> None:
    with hf_rocm.random_state_in_capture():
        gpu.capturing = True
        preserve_random_state()
        for device in ("cuda", "cuda:0", 0, torch.device("cuda")):
            assert torch.equal(torch.cuda.get_rng_state(device), STATE)
        # The function returns a copy, which the caller may change.
        torch.cuda.get_rng_state().zero_()
        assert torch.equal(torch.cuda.random.get_rng_state(), STATE)
        gpu.capturing = False
        assert torch.equal(gpu.state, STATE)


def test_it_does_nothing_if_pytorch_can_read_the_state(gpu: Gpu) -> None:
    gpu.refuses = False
    with hf_rocm.random_state_in_capture():
        gpu.capturing = True
        preserve_random_state()
        preserve_random_state()
    assert torch.equal(gpu.state, STATE + 2)


def test_explicit_seeding_still_fails(gpu: Gpu) -> None:
    with hf_rocm.random_state_in_capture():
        gpu.capturing = True
        with pytest.raises(RuntimeError, match="during CUDA graph capture"):
            torch.cuda.set_rng_state(STATE)


def test_an_error_outside_of_a_capture_is_raised(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: object = "cuda") -> torch.Tensor:
        raise RuntimeError("device lost")

    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": STATE if device == 0 else broken())
    with hf_rocm.random_state_in_capture(), pytest.raises(RuntimeError, match="device lost"):
        torch.cuda.get_rng_state()


def test_outside_of_a_capture_nothing_changes(gpu: Gpu) -> None:
    with hf_rocm.random_state_in_capture():
        preserve_random_state()
        assert torch.equal(torch.cuda.get_rng_state(), STATE + 1) and torch.equal(gpu.state, STATE + 1)


def test_the_functions_are_restored_after_nested_blocks_and_errors(gpu: Gpu) -> None:
    with pytest.raises(ZeroDivisionError), hf_rocm.random_state_in_capture(), hf_rocm.random_state_in_capture():
        raise ZeroDivisionError
    for module in (torch.cuda, torch.cuda.random):
        assert module.get_rng_state == gpu.read and module.set_rng_state == gpu.write


def test_without_a_gpu_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.cuda.get_rng_state
    with hf_rocm.random_state_in_capture():
        assert torch.cuda.get_rng_state is before
