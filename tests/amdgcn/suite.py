"""Run the tests in tests/triton with the machine code of one AMD GPU: `pytest tests/triton --machine-code gfx942`.

All files in tests/triton run, including new ones, except those that are listed here with a reason.
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

# Modules that do not test the machine code of kernels, with the reason. They run only with the interpreter.
ELSEWHERE: Mapping[str, str] = {
    "test_builds": "compiles without executing anything",
    "test_detect": "tests processes without a GPU",
    "test_launch": "tests the host with example kernels",
    "test_launch_keys": "tests the host, without launching kernels",
    "test_attend_models": "emulates recordings with the interpreter",
    "test_decode_models": "fp32 models, for which a GPU uses PyTorch's attention while decoding",
}

# Modules that take minutes and add few compiled variants: whole models, and the first-use checks with realistic sizes.
# They run only in the share "all".
LONG = frozenset({"test_models", "test_experts_models", "test_quantized_models", "test_trained", "test_probe_cases"})

# Parts of the names of functions that test the host, some of them without a reference for the kernel's result. Every
# share except "all" excludes them.
HOST = re.compile(
    r"refus|operators?_(of|in)_|is_needed|only_few_|served_with|tiles_are_powers_of_two|nothing_is_launched|zero_tokens"
    r"|unknown|compiled_builds|users_linear_kernel|one_graph|one_launch|tier_was_named|explain_lists|the_tiles?_of_a_"
    r"|the_limit_of|come_first|stay_stock|a_required_aiter_tier|tiles_of_architectures|a_block_covers_a_row"
    r"|take_long_to_decode|blocks_cover_several"
)

# The number of cases per module for every share. The cases are drawn by architecture and name, and from as many
# different functions as possible.
SHARES: Mapping[str, int | None] = {"few": 1, "sample": 3, "large": 6, "part": 12, "all": None}

# For the smallest share, one case of each of these modules runs: a case of the named function or, if the text contains
# a bracket, a case whose name starts with the text. Other modules, except LAST, run only in larger shares.
FEW = {
    "test_activation": "test_act_and_mul",
    "test_attend_into_cache": "test_queries_and_keys_are_rotated_as_in_the_two_operations",
    "test_begin_step": "test_begin_step",
    "test_decode": "test_single_queries",
    "test_delta": "test_gated_delta_step",
    "test_delta_prefill": "test_gated_delta_prefill[one token",
    "test_dequantize": "test_four_bit_weights_equal_the_torch_tier",
    "test_experts": "test_every_number_of_experts_is_supported",
    "test_experts_mxfp4": "test_every_number_of_experts_is_supported",
    "test_four_bit": "test_every_class_of_rows[5]",
    "test_four_bit_codes": "test_every_class_of_rows[1-",
    "test_flash": "test_packed_sequences",
    "test_linear": "test_every_number_of_rows_is_as_accurate_as_eager",
    "test_look_up": "test_look_up_drafts",
    "test_norm": "test_rms_norm",
    "test_paged": "test_a_new_key_replaces_an_older_one",
    "test_reorder": "test_columns_are_copied_in_the_given_order",
    "test_rope": "test_rope",
    "test_rotary_angles": "test_rotary_angles",
    "test_rounding": "test_a_view_and_no_rows_are_supported",
    "test_routing": "test_choose_experts",
    "test_step": "test_finish_step",
}

LAST = "test_machine_code"

# The cache of compiled kernels.
CACHE = Path(__file__).resolve().parents[2] / ".envs" / "triton"

_gpu: Gpu | None = None
_record: Record | None = None


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("machine code of AMD GPUs")
    group.addoption("--machine-code", metavar="ARCH", help="execute the machine code of Triton kernels for this GPU")
    group.addoption(
        "--machine-code-share",
        choices=list(SHARES),
        default="all",
        help="number of cases, also of interpreted ones (default: all)",
    )
    group.addoption(
        "--machine-code-report",
        metavar="FILE",
        type=Path,
        help="write a JSON report of what was executed, or of the planted faults",
    )
    group.addoption("--machine-code-faults", metavar="N", type=int, help="plant N faults instead of testing")
    group.addoption("--machine-code-again", metavar="FILE", type=Path, help="plant the faults of this report again")
    group.addoption("--machine-code-seed", metavar="N", type=int, default=0, help="seed of the faults (default: 0)")


def gpu() -> Gpu | None:
    """The GPU whose code this process executes, or None if kernels are interpreted."""
    return _gpu


def arch() -> str | None:
    """The GPU's architecture, or None if kernels are interpreted."""
    return None if _gpu is None else _gpu.arch


def record() -> Record:
    """The record of what was executed."""
    assert _record is not None
    return _record


def configure(config: pytest.Config) -> None:
    """Present the GPU to the process if --machine-code names one."""
    global _gpu, _record
    name = config.getoption("--machine-code")
    if name is None:
        return
    from tests.amdgcn import driver
    from tests.amdgcn.device import GPUS
    from tests.amdgcn.record import Record

    if name not in GPUS:
        raise pytest.UsageError(f"--machine-code {name}: the architectures are {', '.join(GPUS)}")
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE))
    _gpu, _record = GPUS[name], Record(name)
    driver.WATCHERS.append(_record.launched)
    context = driver.presented(_gpu)
    context.__enter__()
    config.add_cleanup(lambda: context.__exit__(None, None, None))


def kernel_tests(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests of Triton kernels among all tests."""
    return [item for item in items if "tests/triton/" in item.path.as_posix()]


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases that run elsewhere or are not in the share, and move the check of what was executed to the end."""
    count = SHARES[config.getoption("--machine-code-share")]
    on_triton = kernel_tests(items)
    chosen = [item for item in on_triton if item.path.stem not in ELSEWHERE]
    if count is not None:
        drawn = [item for item in chosen if item.path.stem not in LONG and not HOST.search(item.name)]
        if count == 1:
            drawn = [item for item in drawn if _is_few(item) or item.path.stem == LAST]
        chosen = _drawn(drawn, count)
    chosen.sort(key=lambda item: item.path.stem == LAST)
    config.hook.pytest_deselected(items=[item for item in on_triton if item not in chosen])
    items[:] = [item for item in items if item not in on_triton] + chosen


def select_interpreted(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect interpreted cases that are not in the share."""
    count = SHARES[config.getoption("--machine-code-share")]
    if count is not None:
        on_triton = kernel_tests(items)
        left_out = set(on_triton).difference(_drawn(on_triton, count))
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def finish(config: pytest.Config) -> None:
    """Write the report if a file for it was named and no faults are planted."""
    path = config.getoption("--machine-code-report")
    if _record is not None and path is not None and not plants_faults(config):
        _record.write(path)


def plants_faults(config: pytest.Config) -> bool:
    """Whether this session plants faults instead of testing."""
    options = "--machine-code-faults", "--machine-code-again"
    return any(config.getoption(name) is not None for name in options)


def _drawn(items: Sequence[pytest.Item], count: int) -> list[pytest.Item]:
    """Select `count` cases of every module, and all cases of LAST.

    The cases are ordered by a checksum of architecture and name, so that every run selects the same ones. The order
    starts with one case of every function, then a second one of every function, and so on.
    """
    modules: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    turns: dict[str, int] = defaultdict(int)
    for item in sorted(items, key=lambda item: _checksum(item.nodeid)):
        function = item.nodeid.split("[")[0]
        modules[item.path.stem].append((turns[function], _checksum(function), item.nodeid))
        turns[function] += 1
    chosen = {name for cases in modules.values() for _, _, name in sorted(cases)[:count]}
    return [item for item in items if item.nodeid in chosen or item.path.stem == LAST]


def _is_few(item: pytest.Item) -> bool:
    few = FEW.get(item.path.stem, "-")
    return item.name.startswith(few) if "[" in few else _function(item) == few


def _function(item: pytest.Item) -> str:
    return item.name.split("[")[0]


def _checksum(name: str) -> int:
    return zlib.crc32(f"{arch()} {name}".encode())
