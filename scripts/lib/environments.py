"""The virtual environments, which git ignores: a base with torch and the tools, one per transformers release, and one
with amd-aiter.

All other environments import the base's packages through a .pth file, so torch is installed only once. An environment
is complete if its stamp, which is written last, equals the hash of its inputs. Otherwise the environment is created
again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from lib.console import ScriptError, echo, step

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".envs"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"

RELEASES = ("4.53.3", "4.57.6", "5.0.0", "5.19.0", "5.23.0")
NEEDS_PYTHON = {"5.23.0": (3, 11)}
RUNNABLE = tuple(version for version in RELEASES if sys.version_info >= NEEDS_PYTHON.get(version, (3, 10)))
NEWEST = RUNNABLE[-1]

# AMD's package, and packages that it needs. AMD's package fails with newer releases of Triton, which torch may require.
AITER = ("amd-aiter==0.1.7.post2.dev18", "ninja", "setuptools")
AITER_TRITON = "triton==3.6.0"
# This package decodes machine code, to compare it with the assembly that tests/amdgcn executes.
DECODER = "tinygrad==0.14.0"

# compressed-tensors, which imports loguru, defines formats of quantised checkpoints. transformers detects it, so only
# the newest release's environment without amd-aiter has it.
FORMATS = ("compressed-tensors", "loguru")

TORCH = ("torch", "numpy")
# typer, rich, packaging and safetensors are dependencies of hf-rocm. The other packages are for builds, checks, tests
# and docs.
TOOLS = (
    "pytest",
    "hypothesis",
    "ruff",
    "mypy",
    "hatchling",
    "typer",
    "rich",
    "packaging",
    "safetensors",
    "psutil",
    "uv",
    # Required by transformers' own tests.
    "parameterized",
    # Builds the documentation.
    "mkdocs",
    # Writes the chart as PNG.
    "pillow",
    # The next three are required by `transformers serve`, which tests/serving starts.
    "fastapi",
    "uvicorn",
    "openai",
)


@dataclass(frozen=True)
class Environment:
    """A virtual environment on disk."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return self.path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    def is_made_from(self, ingredients: str, *, stamp: str = "made-from") -> bool:
        recorded = self.path / f".{stamp}"
        return self.python.exists() and recorded.exists() and recorded.read_text() == ingredients

    def record(self, ingredients: str, *, stamp: str = "made-from") -> None:
        draft = self.path / f".{stamp}.draft"
        draft.write_text(ingredients)
        draft.replace(self.path / f".{stamp}")

    def forget(self, *, stamp: str = "made-from") -> None:
        (self.path / f".{stamp}").unlink(missing_ok=True)

    def create(self, *, with_pip: bool) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        options = [] if with_pip else ["--without-pip"]
        hint = "on Debian and Ubuntu, venv is a separate package: apt install python3-venv"
        command = [sys.executable, "-m", "venv", *options, str(self.path)]
        run(command, failure="venv failed to create an environment", hint=hint)

    def install(self, *requirements: str | Path) -> None:
        """Run pip install with the constraints. Modules are compiled when they are first imported."""
        pip = [str(self.python), "-m", "pip", "install", "--no-compile", "--disable-pip-version-check"]
        command = [*pip, "--constraint", str(CONSTRAINTS), *map(str, requirements)]
        run(command, failure="pip could not install the required packages")


def base() -> Environment:
    """The environment with torch, the test tools and pip, but without transformers."""
    environment = Environment(ENVIRONMENTS / "base")
    ingredients = digest(sys.version, platform.machine(), CONSTRAINTS.read_text(), *TORCH, *TOOLS)
    if not environment.is_made_from(ingredients):
        with step("base environment: torch and the tools"):
            environment.create(with_pip=True)
            environment.install(*TORCH)
            environment.install(*TOOLS)
            # peft requires transformers, which only the environments of the releases have
            environment.install("--no-deps", "peft")
            environment.record(ingredients)
    return environment


def wheel(builder: Environment, directory: Path) -> Path:
    """Build this checkout's wheel into `directory`, without network access."""
    shutil.rmtree(directory, ignore_errors=True)
    with step("hf-rocm wheel"):
        command = [str(builder.python), "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
        run(command, failure="the wheel could not be built")
    (built,) = directory.glob("*.whl")
    return built


def release(version: str, shared: Environment, built: Path, *, aiter: bool = False) -> Environment:
    """An environment with transformers==version, accelerate, their dependencies and the wheel.

    It imports the packages of `shared`. The environment of the newest release without aiter also has `FORMATS`.
    aiter: also install AMD's package, which the other environments must not have.
    """
    name = f"{version}-aiter" if aiter else version
    others: tuple[str, ...] = FORMATS if version == NEWEST else ()
    if aiter:
        others = (*AITER, AITER_TRITON, DECODER)
    environment = Environment(ENVIRONMENTS / name)
    base_stamp = (shared.path / ".made-from").read_text()
    ingredients = digest(base_stamp, version, _requirements(built), *others)
    contents = hashlib.sha256(built.read_bytes()).hexdigest()
    if not environment.is_made_from(ingredients):
        with step(f"environment: transformers {version}{', amd-aiter' if aiter else ''}"):
            environment.create(with_pip=False)
            (environment.site_packages / "zz_shared.pth").write_text(f"{shared.site_packages}\n")
            environment.install(f"transformers=={version}", "accelerate", *(AITER if aiter else ()), built)
            if aiter:
                environment.install("--no-deps", AITER_TRITON, DECODER)
            elif others:
                environment.install("--no-deps", *others)
            environment.record(contents, stamp="wheel")
            environment.record(ingredients)
    elif not environment.is_made_from(contents, stamp="wheel"):
        with step(f"hf-rocm in the environment of {name}"):
            environment.forget(stamp="wheel")
            environment.install("--force-reinstall", "--no-deps", built)
            environment.record(contents, stamp="wheel")
    return environment


_locks: list[int] = []


@contextmanager
def lock() -> Iterator[None]:
    """Allow only one set-up or test run in this checkout at a time.

    Child processes of `run` inherit the lock, so the next set-up waits for the last pip of a killed set-up.
    """
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            echo("waiting for another run in this checkout …")
            fcntl.flock(handle, fcntl.LOCK_EX)
        _locks.append(handle.fileno())
        try:
            yield
        finally:
            _locks.clear()


def clean_environ(**changes: str) -> dict[str, str]:
    """The user's environment variables, without those that would change a child process's packages or hf_rocm options.

    PYTHONDONTWRITEBYTECODE is removed too, because hundreds of test processes import transformers.
    changes: variables that are added or replaced.
    """
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "PYTHONDONTWRITEBYTECODE"}
    options = (
        "HF_ROCM_",
        "USE_AITER_",
        "USE_OPTIMIZED_OPS",
        "FORCE_EAGER_ATTENTION",
        "AITER_CONFIG_GEMM_BF16",
        "PRESHUFFLE_M_THRESH",
    )
    kept = {name: value for name, value in os.environ.items() if name not in dropped and not name.startswith(options)}
    return {**kept, "PIP_USER": "0", "PYTHONNOUSERSITE": "1", **changes}


def run(command: Sequence[str], *, failure: str, hint: str = "") -> str:
    """Run a command quietly and return its output. If it fails, raise `ScriptError` with the end of the output."""
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=clean_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        pass_fds=_locks,
    )
    if result.returncode:
        end = "\n".join(f"  | {text[:200]}" for text in result.stdout.strip().splitlines()[-20:])
        advice = f"\n\nhint: {hint}" if hint else ""
        raise ScriptError(f"{failure}\n  command  {' '.join(command)}\n  exit     {result.returncode}\n{end}{advice}")
    return result.stdout


def _requirements(built: Path) -> str:
    """The wheel's dependencies, as its metadata lists them."""
    with ZipFile(built) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    return "\n".join(text for text in metadata.splitlines() if text.startswith("Requires-"))


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
