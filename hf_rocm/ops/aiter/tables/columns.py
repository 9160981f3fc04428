"""The columns of aiter's tables of tuned GEMMs (bf16 and fp16), in each release.

aiter looks up a GEMM by its shape in a CSV file. The layout changed five times from 0.1.5 to 0.1.20, and a file of
another generation fails at the first GEMM, not when it is read. So every generation is recorded here.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from hf_rocm.errors import TuningError

SHAPE = ("M", "N", "K", "bias", "dtype", "outdtype", "scaleAB")
_TUNED = ("libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw")

# Releases up to 0.1.6.post1 call the time `soltimes`; it is in microseconds too.
RENAMED = {"soltimes": "us"}

# (library, the first release whose tables may name it, the first release that no longer supports it)
_LIBRARIES = (
    ("torch", "0", None),
    ("hipblaslt", "0", None),
    ("skinny", "0", None),
    ("asm", "0.1.5", None),
    ("rocblas", "0", "0.1.6.post2"),
    ("triton", "0.1.7.post3", None),
    ("flydsl", "0.1.12", None),
    ("opus", "0.1.15", None),
)

# The architecture that aiter assumes for a row without `gfx`, by compute units.
GFX_OF_UNITS = {80: "gfx942", 304: "gfx942", 256: "gfx950"}


@dataclass(frozen=True)
class Layout:
    """One generation of tables.

    since: the first release with this layout. tuned, untuned: the columns of the table of tuned GEMMs, and of the list
    of GEMMs to tune. key: the columns by which a GEMM is looked up. table: the table that the package ships, in
    `aiter/configs`. tuner: the tuning script, relative to the folder of aiter's sources. options: its options besides
    the two files. reads_variable: whether aiter reads AITER_CONFIG_GEMM_BF16.
    """

    since: str
    tuned: tuple[str, ...]
    untuned: tuple[str, ...]
    key: tuple[str, ...]
    table: str = "bf16_tuned_gemm.csv"
    tuner: str = "gradlib/gradlib/gemm_tuner.py"
    options: tuple[str, ...] = ()
    reads_variable: bool = True

    @property
    def shuffled(self) -> bool:
        """Whether rows have a column for shuffled weights."""
        return "bpreshuffle" in self.untuned


_SHUFFLED = (*SHAPE, "bpreshuffle")

LAYOUTS = (
    Layout(
        "0.1.5.post2",
        tuned=(*SHAPE, "cu_num", "libtype", "solidx", "soltimes", "kernelName", "tflops", "bw"),
        untuned=SHAPE,
        key=("cu_num", *SHAPE),
        table="tuned_gemm.csv",
        reads_variable=False,
    ),
    Layout(
        "0.1.6.post1",
        tuned=(*SHAPE, "cu_num", *("soltimes" if name == "us" else name for name in _TUNED)),
        untuned=SHAPE,
        key=("cu_num", *SHAPE),
        table="tuned_gemm.csv",
    ),
    Layout("0.1.6.post2", tuned=(*SHAPE, "cu_num", *_TUNED), untuned=SHAPE, key=("cu_num", *SHAPE)),
    Layout("0.1.7.post3", tuned=("cu_num", *_SHUFFLED, *_TUNED), untuned=_SHUFFLED, key=("cu_num", *_SHUFFLED)),
    Layout("0.1.12.post2", tuned=("gfx", "cu_num", *_SHUFFLED, *_TUNED), untuned=_SHUFFLED, key=("cu_num", *_SHUFFLED)),
    Layout(
        "0.1.16",
        tuned=("gfx", "cu_num", *_SHUFFLED, *_TUNED),
        untuned=_SHUFFLED,
        key=("gfx", "cu_num", *_SHUFFLED),
        tuner="csrc/gemm_a16w16/gemm_a16w16_tune.py",
        # by default the tuner writes results only after every 100 shapes, and loses them if it is stopped earlier
        options=("--batch", "8"),
    ),
)

# The newest release whose layout was checked.
NEWEST = "0.1.20.post1"


def layout_of(release: str) -> Layout:
    """The layout of a release of aiter; an unknown newer release is assumed to have the newest known layout.

    Raises `TuningError` if the release is older than the first known layout, or is not a version.
    """
    version = parse(release)
    known = [layout for layout in LAYOUTS if Version(layout.since) <= version]
    if not known:
        raise TuningError(
            f"hf_rocm does not support the tables of amd-aiter {release}",
            facts={"known": f"{LAYOUTS[0].since} to {NEWEST}"},
            hint="update it: pip install -U amd-aiter",
        )
    return known[-1]


def layouts_with(columns: tuple[str, ...]) -> list[Layout]:
    """The layouts whose tuned tables have exactly these columns, in any order."""
    return [layout for layout in LAYOUTS if set(layout.tuned) == set(columns)]


def releases_of(layouts: list[Layout]) -> str:
    """The releases with these consecutive layouts, for messages, such as `>=0.1.7.post3,<0.1.12.post2`."""
    after = LAYOUTS[LAYOUTS.index(layouts[-1]) + 1 :]
    return f">={layouts[0].since},<{after[0].since}" if after else f">={layouts[0].since}"


def libraries(release: str) -> frozenset[str]:
    """The values of `libtype` that a release supports; any other raises a KeyError at the GEMM's first call."""
    version = parse(release)
    return frozenset(
        name
        for name, first, removed in _LIBRARIES
        if Version(first) <= version and (removed is None or version < Version(removed))
    )


def parse(release: str) -> Version:
    try:
        return Version(release)
    except InvalidVersion:
        raise TuningError(
            f"{release!r} is not a release of amd-aiter", hint=f"use a version from PyPI, for example {NEWEST}"
        ) from None
