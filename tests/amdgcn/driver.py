"""A Triton driver that presents an AMD GPU and executes its machine code on the CPU.

Triton compiles, specialises and launches as it does for a GPU; only the driver is replaced. The tensors stay in CPU
memory. A launch maps their storages into a separate address space, far apart from one another.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.amdgcn import barriers, decoded, sequences
from tests.amdgcn.device import Gpu
from tests.amdgcn.equivalent import RecordedLaunch
from tests.amdgcn.kernarg import pack, scalar
from tests.amdgcn.machine import Garbage, Memory, Program, Race, Rounding, launch
from tests.amdgcn.machine.vector_memory import Contract

_PAGE = 4096


# Triton uses buffer instructions for tensors of at most 2³¹ - 1 bytes. The size in their descriptors is `RECORDS`.
# Masked lanes get a larger offset.
RECORDS, MASKED = 0x7FFFFFFE, 0x80000000
# The flags in the descriptors: True for CDNA, False for RDNA.
FLAGS = {True: 0x27000, False: 0x31027000}


class Code:
    """A loaded kernel."""

    def __init__(self, name: str, text: str, binary: bytes, arch: str) -> None:
        self.name, self.text, self.arch = name, text, arch
        self.key = hashlib.sha256(binary).hexdigest()[:16]
        self.launches = 0
        self.program = self.compiled = Program.parse(text, arch)
        self.checked: Program | None = None

    def check_text(self) -> None:
        """Raise an error for faults in the program's text, whether a launch reaches them or not.

        Raises `Rounding` for a division that is not the compiler's sequence, and for a planted fault in a conversion. A
        conversion that continues after a label is not recognised, so even the compiled program may have errors of the
        latter kind; a program with a fault may have as many. Raises `Race` for a barrier without a wait for earlier
        stores to LDS.
        """
        if self.checked is self.program:
            return
        for barrier, store in barriers.without_wait(self.program):
            first, second = (f"{self.program.instructions[index].text!r} at {index}" for index in (store, barrier))
            raise Race(f"{first} of {self.name} may be in flight at {second}: some path has no wait between them")
        compiled = list(sequences.wrong(self.compiled))
        left = Counter(reason for _, reason in compiled if reason != sequences.DIVISION)
        for index, reason in compiled if self.program is self.compiled else sequences.wrong(self.program):
            left[reason] -= 1
            if left[reason] < 0:
                raise Rounding(f"{self.program.instructions[index].text!r} at {index} of {self.name}: {reason}")
        self.checked = self.program

    def instructions(self) -> list[str]:
        """The text of every executable instruction, in order."""
        return [instruction.text for instruction in self.program.instructions]


Watcher = Callable[[Code, Any, dict[str, Any]], None]


# For every type: a mask without the sign bit, the bits of infinity, and the bits of the NaNs that operations produce.
# These are quiet NaNs without a payload, with all payload bits set (from Triton's conversion to bf16), or such
# NaNs converted from another type.
NANS = {
    torch.float32: (0x7FFFFFFF, 0x7F800000, 0x7FC00000, 0x7FFFFFFF, 0x7FFF0000, 0x7FFFE000),
    torch.bfloat16: (0x7FFF, 0x7F80, 0x7FC0, 0x7FFF),
    torch.float16: (0x7FFF, 0x7C00, 0x7E00, 0x7FFF, 0x7FF8),
}


class Utils:
    """The functions that Triton calls to load code and to read limits."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.assembly = Path()
        self.loaded: dict[bytes, Code] = {}

    def about_to_load(self, module: Any, function: Any, name: str, files: dict[str, str], key: str) -> None:
        """A hook that Triton calls before it loads a binary. It records the path of the assembly."""
        self.assembly = next(Path(path) for file, path in files.items() if file.endswith(".amdgcn"))

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, Code, int, int, int]:
        """Load a kernel. Returns (module, function, registers, spills, maximum number of threads)."""
        if binary not in self.loaded:
            code = self.loaded[binary] = Code(name, self.assembly.read_text(), binary, self.gpu.arch)
            decoded.compare_once(code.instructions(), binary, self.gpu.arch, self.assembly.with_suffix(".compared"))
        return None, self.loaded[binary], 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, Any]:
        gpu = self.gpu
        known = {"max_shared_mem": gpu.lds, "warpSize": gpu.lanes, "multiprocessor_count": gpu.units, "arch": gpu.arch}
        return {**known, "max_num_regs": 65536}


class Launcher:
    """The launcher that Triton creates for every compiled kernel and calls for every launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.kinds = tuple(source.signature.values())
        self.metadata = metadata

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        code: Code,
        packed: Any,
        facts: Any,
        enter: Any,
        leave: Any,
        *arguments: Any,
    ) -> None:
        space = Space(code.program.target.cdna, code.launches)
        values = []
        for argument, kind in zip(arguments, self.kinds, strict=True):
            if kind == "constexpr":
                continue
            if kind.startswith("*"):
                address = space.address(argument) if isinstance(argument, Tensor) else int(argument or 0)
                values.append(address.to_bytes(8, "little"))
            else:
                values.append(scalar(argument, kind))
        if 0 in (x, y, z):
            return
        space.hide()
        waves = self.metadata.num_warps
        kernarg = pack(code.program, values, (x, y, z), waves * self.metadata.warp_size)
        settings = {"grid": (x, y, z), "waves": waves, "lds": self.metadata.shared, "seed": SEED + code.launches}
        code.launches += 1
        code.check_text()
        for keeper in KEEPERS:
            keeper(code, space, kernarg, settings)
        report = launch(code.program, kernarg=kernarg, memory=space.memory, limit=LIMIT, **settings)
        space.check_numbers(report.written)
        for watcher in WATCHERS:
            watcher(code, report, settings)


# The seed of a compiled kernel's first launch. The seed increases with every launch, which varies the wave order and
# the garbage.
SEED = 0
# Maximum number of wave instructions per launch.
DEFAULT_LIMIT = LIMIT = 50_000_000
# Called after every launch.
WATCHERS: list[Watcher] = []
# Called before every launch.
KEEPERS: list[Callable[[Code, Space, bytes, dict[str, Any]], None]] = []


def base(index: int, turn: int, size: int, start: int) -> int:
    """The address of the storage with this index in a launch. No 32-bit offset leads from one storage into another.

    All 48 bits of an address matter. Most of bits 47:32 are ones, and the others differ between storages, so that a
    lost address bit is detected. Every other storage, if it is larger than two pages, crosses a multiple of 2³², so
    that a lost carry is detected. The bits and the crossings vary with `turn`, the index of the launch. start: the
    storage's address on the CPU, for its alignment.
    """
    high = 0xFFFF_0000_0000 - _PATTERNS[(index + turn) % len(_PATTERNS)]
    page_offset = -(size // 2 // _PAGE + 1) * _PAGE if (index + turn) % 2 else _PAGE
    return high + page_offset + start % _PAGE


_CLEARED = [1 << bit for bit in range(33, 47)]
_PATTERNS = [0, *_CLEARED, *(one | other for index, one in enumerate(_CLEARED) for other in _CLEARED[:index])]


class Space:
    """The address space of one launch. tensors: the tensors of every storage, by the storage's address on the CPU.

    turn: the index of the launch among the launches of the same compiled kernel.
    """

    def __init__(self, cdna: bool, turn: int = 0) -> None:
        self.turn = turn
        self.memory = Memory(Contract(RECORDS, FLAGS[cdna], MASKED))
        self.bases: dict[int, int] = {}
        self.tensors: dict[int, list[Tensor]] = {}

    def address(self, tensor: Tensor) -> int:
        """The address of a tensor. Its storage is mapped on first use, with the alignment that it has on the CPU."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start not in self.bases:
            self.bases[start] = base(len(self.bases), self.turn, storage.nbytes(), start)
            if storage.nbytes():
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.memory.add(self.bases[start], whole.numpy(), writable=True)
        self.tensors.setdefault(start, []).append(tensor)
        return self.bases[start] + tensor.data_ptr() - start

    def recorded(self, kernarg: bytes, settings: dict[str, Any]) -> RecordedLaunch:
        """A copy of a launch's inputs."""
        buffers = []
        for start, tensors in self.tensors.items():
            if tensors[0].untyped_storage().nbytes():
                buffer = self.memory.buffer_at(self.bases[start])
                hidden = buffer.hidden_units[1][buffer.start : buffer.length] != 0 if buffer.hidden_units else None
                buffers.append((self.bases[start], buffer.data.copy(), hidden, tensors[0].dtype))
        return RecordedLaunch(kernarg, tuple(buffers), self.memory.contract, settings)

    def check_numbers(self, written: Mapping[int, np.ndarray]) -> None:
        """Raise `Garbage` if a NaN was stored with bits that no operation produces. written: from a `Report`."""
        for start, tensors in self.tensors.items():
            (dtype, *others) = {tensor.dtype for tensor in tensors}
            if others or dtype not in NANS:
                continue
            whole, bits = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage()).numpy(), NANS[dtype]
            kind, size = np.dtype(f"u{dtype.itemsize}"), whole.size - whole.size % dtype.itemsize
            stored = whole[:size].view(kind)[written[self.bases[start]][:size].reshape(-1, dtype.itemsize)[:, 0]]
            strange = stored[(stored & bits[0] > bits[1]) & ~np.isin(stored & bits[0], bits[2:])]
            if strange.size:
                raise Garbage(
                    f"{strange.size} NaNs with bits that no operation produces were stored, such as {strange[0]:#x}"
                )

    def hide(self) -> None:
        """In every storage, hide the bytes that belong to no tensor, such as those between the rows of a view."""
        for start, tensors in self.tensors.items():
            size = tensors[0].untyped_storage().nbytes()
            if any(tensor.numel() * tensor.itemsize >= size for tensor in tensors):
                continue
            hidden = np.ones(size, bool)
            for tensor in tensors:
                elements = torch.from_numpy(hidden[: size - size % tensor.itemsize]).view(-1, tensor.itemsize)
                shape = (*tensor.shape, tensor.itemsize), (*(step * tensor.itemsize for step in tensor.stride()), 1)
                elements.as_strided(*shape, tensor.storage_offset() * tensor.itemsize).fill_(False)
            self.memory.buffer_at(self.bases[start]).hide(hidden)


def driver_for(gpu: Gpu) -> type[Any]:
    """A Triton driver class for one GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):  # type: ignore[misc]
        launcher_cls = Launcher

        def __init__(self) -> None:
            super().__init__()
            self.utils = Utils(gpu)

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError("no launcher is compiled here")

        def get_current_target(self) -> Any:
            return GPUTarget("hip", gpu.arch, gpu.lanes)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("times measured on a CPU mean nothing")

    return Driver


@contextmanager
def presented(gpu: Gpu) -> Iterator[Any]:
    """Present this GPU to the process; tensors stay on the CPU. Use one GPU per process, because Triton caches compiled
    kernels."""
    from triton import knobs
    from triton.backends import Backend, backends
    from triton.runtime import driver

    from hf_rocm.device import simulated

    hip, amd = torch.version.hip, backends["amd"]
    kind = driver_for(gpu)
    instance = kind()
    torch.version.hip = "7.0"
    backends["amd"] = Backend(compiler=amd.compiler, driver=kind)
    driver.set_active(instance)
    knobs.runtime.kernel_load_start_hook.add(instance.utils.about_to_load)
    try:
        with simulated("cpu", gpu.described()), np.errstate(all="ignore"):
            yield instance
    finally:
        knobs.runtime.kernel_load_start_hook.remove(instance.utils.about_to_load)
        torch.version.hip, backends["amd"] = hip, amd
        driver._active = None
