"""Settings and fixtures for all tests, such as one thread, no network, skipped hardware tests, and a checkpoint."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# set before a test module imports torch or transformers
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# a non-interactive shell starts background processes with SIGINT ignored, which child processes would inherit
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# the same examples in every run and no deadline, so that a test fails because of a bug, not because of a busy machine
settings.register_profile("hf_rocm", deadline=None, derandomize=True, database=None)
settings.load_profile("hf_rocm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-interface",
        action="store_true",
        help="write the current interface to tests/public_interface.json instead of comparing it with that file",
    )
    from tests.amdgcn import suite

    suite.add_options(parser)


def pytest_report_header() -> str:
    """Report which hf_rocm is tested: the installed one or the checkout."""
    spec = importlib.util.find_spec("hf_rocm")
    return f"hf_rocm: {Path(spec.origin).parent if spec and spec.origin else 'not found'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose hardware is missing. The skip reasons begin with "not run".

    Tests that compare all loaded objects run first, before other tests prepare models in the process. Tests that
    measure allocated memory also run first, because graphs that other tests recorded keep some memory allocated.
    """
    items.sort(key=lambda item: item.path.name != "test_reversal.py" and item.get_closest_marker("first") is None)
    for marker, present, reason in (
        ("rocm", _has_amd_gpu, "not run: needs an AMD GPU"),
        ("gpu", _has_gpu, "not run: needs an NVIDIA or AMD GPU"),
    ):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not present():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def scratch_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Let all tests and their child processes use a temporary cache folder instead of the user's.

    The user's folder contains the ledger, which `hf-rocm doctor` reports, and the results of kernel checks.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("HF_ROCM_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Allow only connections to this machine in the test process. Subprocesses inherit HF_HUB_OFFLINE."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test tried to connect to {address[0]}; tests run without a network")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local_only)
        yield


@pytest.fixture(autouse=True, scope="session")
def neutral_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove environment variables that change how commands print. If scripts/test tests the wheel, also change to a
    folder outside the checkout.

    Child processes that start in the checkout could import it instead of the wheel.
    """
    with pytest.MonkeyPatch.context() as patch:
        # Without these variables, commands print as they do to a pipe.
        for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
            patch.delenv(name, raising=False)
        if sys.flags.isolated:
            patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        yield


@pytest.fixture(autouse=True, scope="session")
def manifests_parsed_once() -> Iterator[None]:
    """Parse identical manifests once per process: every catalog that a test loads reads all manifests."""
    from hf_rocm.overlay import manifest

    parsed: dict[str, manifest.Manifest] = {}
    parse = manifest.parse

    def parse_once(text: str, *, source: object) -> manifest.Manifest:
        if text not in parsed:
            parsed[text] = parse(text, source=source)
        return parsed[text]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "parse", parse_once)
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama-like GQA model, trained for a few seconds on real text, and its tokenizer."""
    out = tmp_path_factory.mktemp("tiny-checkpoint")
    train_tiny().train(out, steps=12, batch=4, length=64)
    return out


def train_tiny() -> ModuleType:
    """Import scripts/train_tiny.py, which the demo uses too."""
    spec = importlib.util.spec_from_file_location("train_tiny", ROOT / "scripts" / "train_tiny.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _has_amd_gpu() -> bool:
    import torch

    return torch.version.hip is not None and torch.cuda.is_available()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
