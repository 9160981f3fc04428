"""What pyproject.toml, requirements files and setup.cfg ask pip for."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from hf_rocm.porting.findings import Place, Rule, Severity

CUDA_PIN = Rule(
    "cuda-pin",
    Severity.PROBLEM,
    "a CUDA build of PyTorch is asked for, which replaces the ROCm build that is there",
    "ask for torch without a local version, and let the user's index decide (https://download.pytorch.org/whl/rocm…)",
)
PACKAGE = Rule(
    "nvidia-only-requirement",
    Severity.PROBLEM,
    "this package needs an NVIDIA GPU or CUDA's libraries: installing it fails, or it fails when it is used",
    "move it to an extra (`[project.optional-dependencies] cuda = …`)",
)
REPLACES = Rule(
    "replaces-rocm-build",
    Severity.WARNING,
    "pip may replace what belongs to the ROCm build of PyTorch",
    "leave it to torch, or ask for it without a version",
)
WRONG_AITER = Rule(
    "wrong-aiter",
    Severity.PROBLEM,
    "the package that PyPI calls aiter is an unrelated asyncio helper",
    "amd-aiter",
)
TORCH = Rule(
    "torch-pin",
    Severity.WARNING,
    "unless the ROCm build that is there has just this version, pip replaces it with the CUDA build from PyPI",
    "a range (torch>=2.6), or install with --no-deps",
)
PYTHON = Rule(
    "requires-python",
    Severity.WARNING,
    "AMD's PyTorch images come with Python 3.10 or 3.12, and neither is allowed here",
    "allow one of them, or plan for an image of your own",
)
OLDER = Rule(
    "requires-newer-python",
    Severity.NOTE,
    "some of AMD's PyTorch images come with Python 3.10",
    "take an image with Python 3.12, or allow 3.10 if nothing newer is used",
)

_PACKAGES = {
    "pynvml": "amdsmi, or torch.cuda.mem_get_info()",
    "nvidia-ml-py": "amdsmi, or torch.cuda.mem_get_info()",
    "nvidia-ml-py3": "amdsmi, or torch.cuda.mem_get_info()",
    "flash-attn": "aiter (amd-aiter), scaled_dot_product_attention, or flash-attn built for ROCm",
    "tensorrt": "MIGraphX", "torch-tensorrt": "MIGraphX", "tensorrt-llm": "vLLM or SGLang built for ROCm",
    "onnxruntime-gpu": "onnxruntime-rocm, or onnxruntime-migraphx",
    "cuda-python": "hip-python", "pycuda": "hip-python",
    "faiss-gpu": "faiss-cpu",
    "transformer-engine": "ROCm/TransformerEngine, built for ROCm",
    "flashinfer-python": "aiter", "deep-gemm": "aiter",
    "nvidia-dali-cuda120": "rocAL", "nvidia-cutlass-dsl": "Composable Kernel",
}  # fmt: skip
_PREFIXES = {"nvidia-": "nothing: torch's ROCm build brings its own libraries", "cupy-cuda": "cupy-rocm-7-0, or numpy",
             "cudf-cu": "the CPU libraries", "cuml-cu": "the CPU libraries"}  # fmt: skip
_CUDA_LOCAL = re.compile(r"\+cu\d+")
_CUDA_INDEX = re.compile(r"download\.pytorch\.org/whl/(nightly/|test/)?cu\d+|pypi\.nvidia\.com|pypi\.ngc\.nvidia\.com")
_EXTRAS = {"jax": ("cuda", "cuda11", "cuda12", "cuda13"), "tensorflow": ("and-cuda",)}


def of_pyproject(text: str) -> Iterator[Place]:
    """`text` of a pyproject.toml. Raises ValueError where it is no TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    content = tomllib.loads(text)
    project = _table(content, "project")
    optional = _table(project, "optional-dependencies")
    groups = _table(content, "dependency-groups")
    lines = _Lines(text)
    for required in _strings(project.get("dependencies")):
        yield from _requirement(required, lines.of(required))
    for name, extra in {**groups, **optional}.items():
        if not re.search("cuda|cu1|nvidia|gpu|trt|flash|cpu|rocm|amd", name):  # such a name says what it is for
            for required in _strings(extra):
                yield from _requirement(required, lines.of(required))
    python = project.get("requires-python")
    if isinstance(python, str):
        yield from _python(python, lines.of(python))
    for number, line in enumerate(text.splitlines(), 1):
        if _CUDA_INDEX.search(line.split("#")[0]) and not _only_in_an_extra(content, line):
            yield Place(CUDA_PIN, number, line.strip())


def of_requirements(text: str) -> Iterator[Place]:
    """`text` of a requirements file."""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.split(" #")[0].strip()
        if stripped.startswith(("--index-url", "--extra-index-url", "-i ", "-f ", "--find-links")):
            if _CUDA_INDEX.search(stripped):
                yield Place(CUDA_PIN, number, stripped)
        elif stripped and not stripped.startswith(("#", "-")):
            yield from _requirement(stripped.split(" --")[0], number)


def _only_in_an_extra(content: dict[str, Any], line: str) -> bool:
    """Whether uv takes the index in this line only where somebody asks for an extra that names it."""
    uv = _table(_table(content, "tool"), "uv")
    indexes = [each for each in uv.get("index", ()) if isinstance(each, dict) and str(each.get("url")) in line]
    if not indexes or not all(each.get("explicit") for each in indexes):
        return False
    names = {each.get("name") for each in indexes}
    sources = [
        each for value in _table(uv, "sources").values() for each in (value if isinstance(value, list) else [value])
    ]
    return all("extra" in each or "group" in each for each in sources if each.get("index") in names)


def _requirement(text: str, line: int) -> Iterator[Place]:
    try:
        wanted = Requirement(text)
    except InvalidRequirement:
        return
    name = wanted.name.lower().replace("_", "-").replace(".", "-")
    if wanted.marker is not None and re.search("rocm|hip|cuda|win32|darwin", str(wanted.marker)):
        return
    if name in ("torch", "torchvision", "torchaudio") and _CUDA_LOCAL.search(f"{wanted.specifier}{wanted.url or ''}"):
        yield Place(CUDA_PIN, line, text)
    elif name == "torch" and any(
        each.operator in ("==", "===") and "rocm" not in each.version for each in wanted.specifier
    ):
        yield Place(TORCH, line, text)
    elif name == "aiter":
        yield Place(WRONG_AITER, line, text)
    elif name in ("triton", "pytorch-triton", "xformers") and (name != "xformers" or "==" in str(wanted.specifier)):
        yield Place(REPLACES, line, text)
    elif extra := wanted.extras.intersection(_EXTRAS.get(name, ())):
        yield Place(PACKAGE, line, f"{name}[{', '.join(sorted(extra))}]", instead=_instead_of_extra(name))
    else:
        instead = _PACKAGES.get(name) or next((new for prefix, new in _PREFIXES.items() if name.startswith(prefix)), "")
        if instead:
            yield Place(PACKAGE, line, text, instead=f"{instead}; or {PACKAGE.instead}")


def _instead_of_extra(name: str) -> str:
    return "jax with jax-rocm7-plugin" if name == "jax" else "tensorflow-rocm"


def _python(text: str, line: int) -> Iterator[Place]:
    try:
        allowed = SpecifierSet(text)
    except InvalidSpecifier:
        return
    fits = [any(allowed.contains(f"{release}.{patch}") for patch in (3, 12)) for release in ("3.10", "3.12")]
    if not fits[0]:
        yield Place(OLDER if fits[1] else PYTHON, line, f"requires-python = '{text}'")


def _table(content: Any, name: str) -> dict[str, Any]:
    found = content.get(name) if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


def _strings(values: Any) -> list[str]:
    return [each for each in values if isinstance(each, str)] if isinstance(values, list) else []


class _Lines:
    """Where a value stands in the text: TOML's reader doesn't say."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._taken: set[tuple[str, int]] = set()

    def of(self, value: str) -> int:
        """The next line, counted from 1, that has this value in quotes."""
        quoted = (f'"{value}"', f"'{value}'")
        for number, line in enumerate(self._lines, 1):
            if (value, number) not in self._taken and any(each in line for each in quoted):
                self._taken.add((value, number))
                return number
        return 1
