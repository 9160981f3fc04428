"""Requirements in pyproject.toml, requirements files, setup.py, setup.cfg, conda environments and `pip install`."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from hf_rocm.tools.porting.findings import Place, Rule, Severity

CUDA_PIN = Rule(
    "cuda-pin",
    Severity.PROBLEM,
    "pip installs a CUDA build of PyTorch in place of the ROCm build",
    "require torch without a local version, and let the user select the index (https://download.pytorch.org/whl/rocm…)",
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
    "pip may replace a package that belongs to the ROCm build of PyTorch",
    "let torch install it, or require it without a version",
)
WRONG_AITER = Rule(
    "wrong-aiter",
    Severity.PROBLEM,
    "the package that is named aiter on PyPI is an unrelated asyncio helper",
    "amd-aiter",
)
TORCH = Rule(
    "torch-pin",
    Severity.WARNING,
    "unless the installed ROCm build has exactly this version, pip replaces it with the CUDA build from PyPI",
    "a range (torch>=2.6), or install with --no-deps",
)
PYTHON = Rule(
    "requires-python",
    Severity.WARNING,
    "AMD's PyTorch images have Python 3.10 or 3.12, and this requirement allows neither",
    "allow one of them, or build your own image",
)
OLDER = Rule(
    "requires-newer-python",
    Severity.NOTE,
    "some of AMD's PyTorch images have Python 3.10",
    "use an image with Python 3.12, or allow 3.10 if the code needs nothing newer",
)

_PACKAGES = {
    "pynvml": "amdsmi, or torch.cuda.mem_get_info()",
    "nvidia-ml-py": "amdsmi, or torch.cuda.mem_get_info()",
    "nvidia-ml-py3": "amdsmi, or torch.cuda.mem_get_info()",
    "flash-attention": "aiter (amd-aiter), scaled_dot_product_attention, or flash-attn built for ROCm",
    "gputil": "amdsmi, or torch.cuda.mem_get_info()", "gpustat": "amdsmi", "nvitop": "amdsmi, or nvtop",
    "numba-cuda": "numba-hip, AMD's fork of Numba",
    "flash-attn": "aiter (amd-aiter), scaled_dot_product_attention, or flash-attn built for ROCm",
    "tensorrt": "MIGraphX", "torch-tensorrt": "MIGraphX", "tensorrt-llm": "vLLM or SGLang built for ROCm",
    "onnxruntime-gpu": "onnxruntime-rocm, or onnxruntime-migraphx",
    "cuda-python": "hip-python", "pycuda": "hip-python",
    "faiss-gpu": "faiss-cpu",
    "transformer-engine": "ROCm/TransformerEngine, built for ROCm",
    "flashinfer-python": "aiter", "deep-gemm": "aiter",
    "nvidia-dali-cuda120": "rocAL", "nvidia-cutlass-dsl": "Composable Kernel",
}  # fmt: skip
_PREFIXES = {"nvidia-": "nothing: torch's ROCm build contains its libraries", "cupy-cuda": "cupy-rocm-7-0, or numpy",
             "cudf-cu": "a CPU library, such as pandas", "cuml-cu": "a CPU library, such as scikit-learn"}  # fmt: skip
_CUDA_LOCAL = re.compile(r"\+cu\d+")
_CUDA_INDEX = re.compile(r"download\.pytorch\.org/whl/(nightly/|test/)?cu\d+|pypi\.nvidia\.com|pypi\.ngc\.nvidia\.com")
_REPOSITORY = re.compile(r"git\+\S*/([\w-]+?)(?:\.git)?(?:@\S*)?(?:#\S*)?$")
_QUOTED = re.compile(r"\"([^\"]*)\"|'([^']*)'")
_EXTRAS = {"jax": ("cuda", "cuda11", "cuda12", "cuda13"), "tensorflow": ("and-cuda",)}


def of_pyproject(text: str) -> Iterator[Place]:
    """Yield findings in a pyproject.toml. Raises ValueError if `text` is not TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    content = tomllib.loads(text)
    project = _table(content, "project")
    optional = _table(project, "optional-dependencies")
    groups = _table(content, "dependency-groups")
    lines, sources = _Lines(text), _Sources(content)
    for required in _strings(project.get("dependencies")):
        yield from of_requirement(required, lines.of(required))
    for name, extra in {**groups, **optional}.items():
        # Skip the groups that are specific to a vendor or device.
        if not re.search("cuda|cu1|nvidia|gpu|trt|flash|cpu|rocm|amd", name):
            for required in _strings(extra):
                yield from of_requirement(required, lines.of(required))
    python = project.get("requires-python")
    if isinstance(python, str):
        yield from _python(python, lines.of(python))
    for number, line in enumerate(text.splitlines(), 1):
        if _CUDA_INDEX.search(line.split("#")[0]) and not sources.only_in_an_extra(line):
            yield Place(CUDA_PIN, number, line.strip())


def of_requirements(text: str) -> Iterator[Place]:
    """Yield findings in a requirements file."""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.split(" #")[0].strip()
        if stripped.startswith(("--index-url", "--extra-index-url", "-i ", "-f ", "--find-links")):
            yield from of_index(stripped, number)
        elif stripped and not stripped.startswith(("#", "-")):
            yield from of_requirement(stripped.split(" --")[0], number)


class _Sources:
    """uv's package indexes by URL, and whether an index is used only for extras or groups."""

    def __init__(self, content: dict[str, Any]) -> None:
        uv = _table(_table(content, "tool"), "uv")
        self._indexes: dict[str, list[dict[str, Any]]] = {}
        for index in uv.get("index", ()) if isinstance(uv.get("index"), list) else ():
            if isinstance(index, dict):
                self._indexes.setdefault(str(index.get("url")), []).append(index)
        # Names of indexes that are used without an extra or group.
        self._unconditional: set[object] = set()
        for value in _table(uv, "sources").values():
            for source in value if isinstance(value, list) else [value]:
                if isinstance(source, dict) and "extra" not in source and "group" not in source:
                    self._unconditional.add(str(source.get("index")))

    def only_in_an_extra(self, line: str) -> bool:
        """Return whether uv uses the index in this line only for extras or groups."""
        urls = {url for part in _QUOTED.finditer(line) for url in part.groups() if url}
        indexes = [index for url in urls for index in self._indexes.get(url, ())]
        if not indexes or not all(index.get("explicit") for index in indexes):
            return False
        return not any(str(index.get("name")) in self._unconditional for index in indexes)


def of_index(text: str, line: int) -> Iterator[Place]:
    """Check an option of pip that contains the URL of a package index."""
    if _CUDA_INDEX.search(text):
        yield Place(CUDA_PIN, line, text)


def of_requirement(text: str, line: int) -> Iterator[Place]:
    """Check a requirement in pip's syntax: a name with extras, versions and a marker, or the URL of a repository."""
    if match := _REPOSITORY.match(text):
        text = match[1]
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
        pin.operator in ("==", "===") and "rocm" not in pin.version for pin in wanted.specifier
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
    table = content.get(name) if isinstance(content, dict) else None
    return table if isinstance(table, dict) else {}


def _strings(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


class _Lines:
    """Find the line number of a value in the text, which the TOML parser does not report."""

    def __init__(self, text: str) -> None:
        self._lines: dict[str, deque[int]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            for part in _QUOTED.finditer(line):
                self._lines.setdefault(part[1] or part[2] or "", deque()).append(number)

    def of(self, value: str) -> int:
        """Return the number (from 1) of the next line with this value in quotes; 1 if there is none."""
        lines = self._lines.get(value)
        return lines.popleft() if lines else 1
