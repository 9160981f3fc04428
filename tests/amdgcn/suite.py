"""The suites of tests/triton on the machine code of one AMD GPU: `pytest tests/triton --machine-code gfx942`.

Whatever lies in tests/triton runs, a new file too, except what is listed here with a reason.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.amdgcn.device import Gpu
    from tests.amdgcn.record import Record

# Modules that are about the interpreter or the host, and run with the interpreter.
ELSEWHERE: Mapping[str, str] = {
    "test_builds": "compiles, and executes nothing",
    "test_detect": "about processes without a GPU",
    "test_launch": "about the host, with kernels that are made up",
    "test_decode_models": "models in fp32, which decode attention leaves to PyTorch on a GPU",
}

# Minutes, and hardly a form of a kernel that the other suites lack: whole models, and the first-use checks with the
# sizes of real ones. Only in a run of everything.
LONG = frozenset({"test_models", "test_experts_models", "test_quantized_models", "test_trained", "test_probe_cases"})

# Functions about the host, by name, some without an oracle for what a kernel computes: a share leaves them out.
HOST = re.compile(
    r"refus|operators?_(of|in)_|is_needed|alone_are_ours|served_with|tile_is_whole|for_nothing|no_tokens|unknown"
    r"|compiled_ahead|pairs_are_few|users_own|one_graph|one_launch|tier_was_named|says_the_truth"
)

# Cases that are run, drawn by architecture and name: so many of a module, of different functions.
SHARES: Mapping[str, int | None] = {"few": 1, "sample": 3, "large": 12, "all": None}

# For the smallest share, of which a case each is run: functions that launch the kernels of one module.
FEW = {
    "test_activation": "test_act_and_mul",
    "test_decode": "test_single_queries",
    "test_delta": "test_gated_delta_step",
    "test_dequantize": "test_four_bits",
    "test_experts": "test_every_number_of_experts",
    "test_experts_mxfp4": "test_every_number_of_experts",
    "test_four_bit": "test_every_class_of_rows",
    "test_flash": "test_packed_sequences",
    "test_linear": "test_every_number_of_rows",
    "test_norm": "test_rms_norm",
    "test_rope": "test_rope",
    "test_routing": "test_choose_experts",
}

LAST = "test_machine_code"

CACHE = Path(__file__).resolve().parents[2] / ".envs" / "triton"  # of compiled kernels

_gpu: Gpu | None = None
_record: Record | None = None


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("machine code of AMD GPUs")
    group.addoption("--machine-code", metavar="ARCH", help="execute the Triton kernels' machine code for this GPU")
    group.addoption("--machine-code-share", choices=list(SHARES), default="all", help="how many cases (default: all)")
    group.addoption("--machine-code-report", metavar="FILE", type=Path, help="write what was executed, as JSON")
    group.addoption("--machine-code-faults", metavar="N", type=int, help="plant N faults instead of testing")
    group.addoption("--machine-code-again", metavar="FILE", type=Path, help="plant the faults of this report instead")
    group.addoption("--machine-code-seed", metavar="N", type=int, default=0, help="of the faults (default: 0)")


def gpu() -> Gpu | None:
    """The GPU whose code this process executes, or None: then kernels are interpreted."""
    return _gpu


def arch() -> str | None:
    """Its architecture, or None."""
    return None if _gpu is None else _gpu.arch


def record() -> Record:
    """What was executed so far."""
    assert _record is not None
    return _record


def configure(config: pytest.Config) -> None:
    """Present the GPU for the whole process, if one is named."""
    global _gpu, _record
    wanted = config.getoption("--machine-code")
    if wanted is None:
        return
    from tests.amdgcn import driver
    from tests.amdgcn.device import GPUS
    from tests.amdgcn.record import Record

    if wanted not in GPUS:
        raise pytest.UsageError(f"--machine-code {wanted}: the architectures are {', '.join(GPUS)}")
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE))
    _gpu, _record = GPUS[wanted], Record(wanted)
    driver.WATCHERS.append(_record.launched)
    present = driver.presented(_gpu)
    present.__enter__()
    config.add_cleanup(lambda: present.__exit__(None, None, None))


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs elsewhere and what the share leaves out; the check of what was executed comes last."""
    count = SHARES[config.getoption("--machine-code-share")]
    ours = [item for item in items if "tests/triton/" in item.path.as_posix()]
    chosen = [item for item in ours if item.path.stem not in ELSEWHERE]
    if count is not None:
        drawn = [item for item in chosen if item.path.stem not in LONG and not HOST.search(item.name)]
        if count == 1:
            drawn = [item for item in drawn if _function(item) == FEW.get(item.path.stem) or item.path.stem == LAST]
        chosen = _drawn(drawn, count)
    chosen.sort(key=lambda item: item.path.stem == LAST)
    config.hook.pytest_deselected(items=[item for item in ours if item not in chosen])
    items[:] = [item for item in items if item not in ours] + chosen


def finish(config: pytest.Config) -> None:
    """Write the report."""
    path = config.getoption("--machine-code-report")
    if _record is not None and path is not None and not plants_faults(config):
        _record.write(path)


def plants_faults(config: pytest.Config) -> bool:
    """Whether this session plants faults instead of testing."""
    options = "--machine-code-faults", "--machine-code-again"
    return any(config.getoption(name) is not None for name in options)


def _drawn(items: Sequence[pytest.Item], count: int) -> list[pytest.Item]:
    """So many cases of every module, in the order of a checksum of architecture and name: the same in every run.

    First one case of every function, then a second one of every function, and so on.
    """
    modules: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    turns: dict[str, int] = defaultdict(int)
    for item in sorted(items, key=lambda item: _checksum(item.nodeid)):
        function = item.nodeid.split("[")[0]
        modules[item.path.stem].append((turns[function], _checksum(function), item.nodeid))
        turns[function] += 1
    chosen = {name for cases in modules.values() for _, _, name in sorted(cases)[:count]}
    return [item for item in items if item.nodeid in chosen or item.path.stem == LAST]


def _function(item: pytest.Item) -> str:
    return item.name.split("[")[0]


def _checksum(name: str) -> int:
    return zlib.crc32(f"{arch()} {name}".encode())
