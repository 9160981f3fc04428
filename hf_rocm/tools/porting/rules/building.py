"""CUDA's compiler flags, architecture lists and paths in Python, shell scripts and CMake."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from hf_rocm.tools.porting.findings import Place, Rule, Severity, excerpt
from hf_rocm.tools.porting.libraries import by_object
from hf_rocm.tools.porting.module import Module
from hf_rocm.tools.porting.rules import allocator, native

FLAG = Rule(
    "nvcc-flag",
    Severity.PROBLEM,
    "only nvcc accepts this flag: hipcc rejects it",
    "pass it only where torch.version.hip is None; PyTorch's extension builder adds --offload-arch automatically",
)
ARCHITECTURES = Rule(
    "cuda-arch-list",
    Severity.WARNING,
    "a list of NVIDIA's architectures, which no build for ROCm reads",
    "PYTORCH_ROCM_ARCH, or CMAKE_HIP_ARCHITECTURES, such as gfx90a;gfx942",
)
PATH = Rule(
    "cuda-path",
    Severity.WARNING,
    "a machine with AMD GPUs does not have CUDA's toolkit: its folder is missing, and torch's CUDA_HOME is None",
    "/opt/rocm, or ROCM_HOME of torch.utils.cpp_extension",
)
CMAKE = Rule(
    "cmake-cuda",
    Severity.WARNING,
    "CMake's CUDA support requires nvcc",
    "enable_language(HIP) and find_package(hip), if the user selects ROCm",
)

_FLAG = re.compile(
    r"^-{1,2}(?:gencode\b|arch[= ](?:sm_|compute_|native)|gpu-architecture|gpu-code|generate-code"
    r"|expt-(?:relaxed|extended)|use_fast_math|ptxas-options|Xptxas|maxrregcount|extended-lambda"
    r"|threads[= ]\d|Xcudafe|diag-suppress|generate-line-info|allow-unsupported-compiler|Xfatbin|rdc=)"
)
_ARCHITECTURE = re.compile(r"^(?:arch=compute|code=sm)_")
_VARIABLES = ("TORCH_CUDA_ARCH_LIST", "CMAKE_CUDA_ARCHITECTURES", "CUDAARCHS", "CUDA_ARCH_LIST",
              "TCNN_CUDA_ARCHITECTURES", "CUDA_ARCHITECTURES", "FLASH_ATTN_CUDA_ARCHS")  # fmt: skip
_HOME = ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_ROOT_DIR", "CUDA_BIN_PATH", "CUDNN_PATH")
_FOLDER = re.compile(r"/usr/local/cuda\b")
_LOADERS = ("CDLL", "LoadLibrary", "find_library", "dlopen", "PyDLL", "load_library")
_COMMAND = re.compile(r"^[ \t]*(\w+)[ \t]*\(", re.MULTILINE)
_CMAKE_COMMENT = re.compile(r"#\[(=*)\[.*?(?:\]\1\]|\Z)|#[^\n]*|\"(?:\\.|[^\"\\])*\"?", re.DOTALL)
_CMAKE_PLATFORM = re.compile(r"HIP|ROCM|AMD|NVIDIA", re.IGNORECASE)
_TARGET = re.compile(r"\bCUDA::\w+")


def of_setting(name: str, value: str, line: int) -> Iterator[Place]:
    """Check a variable that is set in a shell command, a Makefile, a Dockerfile or an option -DNAME=VALUE."""
    if name in allocator.VARIABLES:
        yield from allocator.read(value, line)
    elif name in _VARIABLES and value:
        yield Place(ARCHITECTURES, line, f"{name}={value}")
    elif (name in _HOME and value) or _FOLDER.search(value):
        yield Place(PATH, line, f"{name}={value}")


def of_arguments(words: Iterable[str], line: int) -> Iterator[Place]:
    """Find arguments of a command that are flags of nvcc, or that name CUDA architectures or folders."""
    for word in words:
        if _FLAG.match(word):
            yield Place(FLAG, line, word)
        elif match := re.match(r"-D(\w+)=(.*)", word):
            yield from of_setting(match[1], match[2], line)
        elif re.match(r"(?:-[IL])?/usr/local/cuda\b", word):
            yield Place(PATH, line, word)


def in_python(module: Module) -> Iterator[Place]:
    """Find extra_cuda_cflags=["-arch=sm_80"], os.environ["TORCH_CUDA_ARCH_LIST"] = "8.0", and CDLL("libcudart.so")."""
    seen: set[tuple[int, str]] = set()
    for node, context in module.nodes(ast.Constant, ast.Call, ast.Assign):
        if module.guarded(context):
            continue
        for place in _in_python(module, node):
            if (place.line, place.what) not in seen:
                seen.add((place.line, place.what))
                yield place


def _in_python(module: Module, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
        if not _in_code(module, node):
            return
        if (_FLAG.match(node.value) and _compiling(module, node)) or (
            _ARCHITECTURE.match(node.value) and _compiling(module, node)
        ):
            yield Place(FLAG, node.lineno, node.value)
        elif _FOLDER.match(node.value):
            yield Place(PATH, node.lineno, node.value)
    elif isinstance(node, ast.Call):
        name = module.called(node.func)
        first = node.args[0] if node.args else None
        text = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
        if name in _LOADERS and text and not module.expected(node):
            if instead := by_object(text):
                yield Place(native.OBJECT, node.lineno, f"{name}({text!r})", instead=instead)
        elif len(node.args) >= 2 and name in ("setdefault", "putenv", "setenv"):
            yield from _set(first, node.args[1])
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and (module.name(target.value) or "").endswith("environ"):
                yield from _set(target.slice, node.value)


def _set(name: ast.expr | None, value: ast.expr) -> Iterator[Place]:
    # An empty value removes the list.
    empty = isinstance(value, ast.Constant) and not value.value
    if isinstance(name, ast.Constant) and name.value in _VARIABLES and not empty:
        shown = str(value.value) if isinstance(value, ast.Constant) else "…"
        yield Place(ARCHITECTURES, value.lineno, f"{name.value!s}={shown}")


def _in_code(module: Module, node: ast.Constant) -> bool:
    """Return whether a string is a value, not a docstring or a message."""
    parent = module.parents.get(node)
    return not isinstance(parent, ast.Expr | ast.JoinedStr) and not module.shown(node)


def _compiling(module: Module, node: ast.AST) -> bool:
    """Return whether a string can be a flag, which depends on the expression or statement that contains it.

    It can be a flag in a list, a tuple, an addition, an assignment or a keyword argument, or as an argument of
    `append`, `extend`, `insert` or `add`, but not in a comparison.
    """
    parent = module.parents.get(node)
    return isinstance(parent, ast.List | ast.Tuple | ast.BinOp | ast.Assign | ast.keyword) or (
        isinstance(parent, ast.Call) and getattr(parent.func, "attr", "") in ("append", "extend", "insert", "add")
    )


def of_cmake(text: str) -> Iterator[Place]:
    """Yield findings in CMakeLists.txt and *.cmake, except in an `if` that tests the platform."""
    text = _CMAKE_COMMENT.sub(lambda match: match[0] if match[0][0] == '"' else re.sub(r"[^\n]", " ", match[0]), text)
    # whether each enclosing condition tests the platform, outermost first; a guard covers nested conditions
    guards = [False]
    line, last, listed = 1, 0, False
    for match in _COMMAND.finditer(text):
        line += text.count("\n", last, match.start(1))
        last = match.start(1)
        name, arguments = match[1].lower(), _command_arguments(text, match.end())
        if name == "if":
            guards.append(guards[-1] or bool(_CMAKE_PLATFORM.search(arguments)))
        elif name == "elseif" and len(guards) > 1:
            guards[-1] = guards[-1] or bool(_CMAKE_PLATFORM.search(arguments))
        elif name == "endif" and len(guards) > 1:
            guards.pop()
        elif not guards[-1]:
            for place in _of_cmake_command(name, arguments, line):
                # Report only the first command that sets an architecture list.
                if place.rule is not ARCHITECTURES or not listed:
                    yield place
                listed = listed or place.rule is ARCHITECTURES


def _of_cmake_command(name: str, arguments: str, line: int) -> Iterator[Place]:
    words = arguments.replace('"', " ").split()
    shown = f"{name}({' '.join(words)})"
    library = re.search(r"[( ](?:CUDA|CUDAToolkit|CUDNN|TensorRT)(?=[ )])", shown)
    if (name in ("find_package", "enable_language", "project", "check_language") and library) or (
        name.startswith("cuda_") and name != "cuda_version"
    ):
        yield Place(CMAKE, line, excerpt(shown, *library.span()) if library else excerpt(shown))
    elif name == "target_link_libraries" and (match := _TARGET.search(arguments)):
        yield Place(CMAKE, line, f"target_link_libraries(… {match[0]})")
    elif name in ("set", "list", "set_property", "set_target_properties") and (
        variable := next((word for word in words if word in _VARIABLES), None)
    ):
        yield Place(ARCHITECTURES, line, f"{name}({variable} …)")
    elif flag := next((word for word in words if _FLAG.match(word)), None):
        yield Place(FLAG, line, f"{name}(… {flag})")


def _command_arguments(text: str, start: int) -> str:
    """Return the arguments of a command, up to its closing parenthesis or at most 4000 characters."""
    depth = 1
    for position in range(start, min(len(text), start + 4000)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if not depth:
            return text[start:position]
    return text[start : start + 4000]
