"""Shell commands in scripts, Dockerfiles, Makefiles, notebooks and Python: NVIDIA's tools, packages and containers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hf_rocm.tools.porting.findings import Place, Rule, Severity
from hf_rocm.tools.porting.libraries import TOOLS
from hf_rocm.tools.porting.module import Context, Module
from hf_rocm.tools.porting.rules import building, requirements
from hf_rocm.tools.porting.shell import Command, commands

STARTED = Rule(
    "nvidia-tool-call",
    Severity.PROBLEM,
    "a machine with AMD GPUs does not have this program: Python raises FileNotFoundError, and a shell prints an error",
    "",
)
TYPED = Rule(
    "nvidia-tool",
    Severity.WARNING,
    "a machine with AMD GPUs does not have this program: the command fails",
    "",
)
SYSTEM = Rule(
    "nvidia-system-package",
    Severity.PROBLEM,
    "this installs CUDA's toolkit, libraries or driver, which an AMD GPU does not use",
    "start from an image with ROCm (rocm/pytorch), or install AMD's equivalents",
)
CONTAINER = Rule(
    "nvidia-container",
    Severity.WARNING,
    "this option needs NVIDIA's container runtime",
    "--device=/dev/kfd --device=/dev/dri --group-add video --security-opt seccomp=unconfined",
)

_LAUNCHERS = {
    "os.system", "os.popen", "shutil.which", "get_ipython().system", "asyncio.create_subprocess_exec",
    "asyncio.create_subprocess_shell",
}  # fmt: skip
_EXPECTED = {"FileNotFoundError", "OSError", "CalledProcessError", "SubprocessError", "Exception", "BaseException"}
_APT = re.compile(
    r"^(?:cuda(?:-(?:toolkit|nvcc|compiler|libraries|runtime|drivers|command-line-tools|cudart|minimal-build)\S*"
    r"|-\d\S*)?|nvidia-(?:driver|cuda|container|utils|docker)\S*|lib(?:cudnn|nccl|cublas|cusparse|cusolver|cufft"
    r"|curand|nvinfer|cudart)\d?\S*|tensorrt\S*)$"
)
CONDA = re.compile(
    r"^(?:[\w-]+::)?(?:cudatoolkit|cuda(?:-toolkit|-nvcc|-libraries)?|pytorch-cuda|cudnn|nccl)(?:[=<>].*)?$"
)
_PIP = re.compile(r"^pip3?(?:\.\d+)?$")
_VALUES = {"--no-binary", "--only-binary", "-r", "-c", "-t",
           "--requirement", "--constraint", "--target", "--prefix", "--python", "-p", "--root", "-e",
           "--platform", "--timeout", "--retries", "--cache-dir", "--src", "--no-build-isolation-package",
           "--upgrade-package",
           "--log"}  # fmt: skip
_VARIABLE = re.compile(r"^\s*(?:override\s+|export\s+)?(\w+)\s*[:?+]*=\s*(.*)$")
_MAKE_PLATFORM = re.compile("rocm|hip(?:cc|blas)?|amd|nvidia", re.IGNORECASE)
# Commands that only test or print a path, for which a missing path is not an error.
_INSPECTING = {"[", "[[", "test", "for", "echo", "printf"}
_INDEXES = ("--index-url", "--extra-index-url", "--find-links", "-i", "-f", "--index", "--default-index")


def of_shell(text: str) -> Iterator[Place]:
    """Yield findings in a shell script."""
    for command in commands(text):
        yield from of_command(command)


def of_command(command: Command) -> Iterator[Place]:
    """Yield findings in one shell command from any kind of file."""
    if command.guarded:
        return
    for setting in _settings(command):
        yield from building.of_setting(*setting, command.line)
    words, shown = command.words, " ".join(command.words)
    if not words or command.tolerated or command.program in _INSPECTING:
        return
    if command.program in TOOLS:
        yield Place(TYPED, command.line, shown, instead=TOOLS[command.program])
    elif (packages := _pip(words)) is not None:
        yield from _installed(packages, command.line)
    elif command.program in ("apt-get", "apt", "yum", "dnf", "apk") and "install" in words:
        for word in words:
            if _APT.match(word):
                yield Place(SYSTEM, command.line, f"{command.program} install {word}")
    elif command.program in ("conda", "mamba", "micromamba") and ("install" in words or "create" in words):
        for word in words:
            if CONDA.match(word):
                yield Place(SYSTEM, command.line, f"{command.program} install {word}")
    elif command.program in ("docker", "podman", "nvidia-docker"):
        yield from _container(words, command.line)
    yield from building.of_arguments(words[1:], command.line)


def of_makefile(text: str) -> Iterator[Place]:
    """Yield findings in a Makefile's recipes and variables, except in a condition that tests the platform."""
    # whether each enclosing condition tests the platform, outermost first; a guard covers nested conditions
    guards = [False]
    for number, line in enumerate(text.splitlines(), 1):
        word = line.split(maxsplit=1)[0] if line.strip() else ""
        if word in ("ifeq", "ifneq", "ifdef", "ifndef"):
            guards.append(guards[-1] or bool(_MAKE_PLATFORM.search(line)))
        elif word == "endif" and len(guards) > 1:
            guards.pop()
        elif guards[-1] or word.startswith("#"):
            continue
        elif match := _VARIABLE.match(line):
            value = match[2].split(" #")[0].split()
            yield from building.of_setting(match[1], " ".join(value), number)
            if value and value[0].rpartition("/")[2] in TOOLS:
                yield Place(TYPED, number, line.strip(), instead=TOOLS[value[0].rpartition("/")[2]])
            yield from building.of_arguments(value, number)
        elif line.startswith("\t"):
            for command in commands(line.lstrip("\t@-+ "), line=number):
                yield from of_command(command)


def started(module: Module) -> Iterator[Place]:
    """Find subprocess.run(["nvidia-smi"]), os.system("nvcc …"), and `!pip install …` in a notebook."""
    for node, context in module.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        name = _called(module, node)
        if name not in _LAUNCHERS and not name.startswith("subprocess."):
            continue
        if module.guarded(context, "smi") or _expects_failure(module, node):
            continue
        argument = _argument(module, node, context)
        for command in _commands_of(argument, node.lineno):
            for place in of_command(command):
                if place.rule is TYPED and name != "get_ipython().system":
                    if name != "shutil.which":
                        yield Place(STARTED, place.line, place.what, instead=place.instead)
                else:
                    yield place


def _called(module: Module, node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
        return f"{module.name(node.func.value.func)}().{node.func.attr}"
    return module.name(node.func) or ""


def _argument(module: Module, node: ast.Call, context: Context) -> ast.expr | None:
    """Return the expression of the command that is started, even if it was assigned to a variable, or None."""
    argument = node.args[0] if node.args else next((word.value for word in node.keywords if word.arg == "args"), None)
    if isinstance(argument, ast.Call) and module.name(argument.func) == "shlex.split" and argument.args:
        argument = argument.args[0]
    if isinstance(argument, ast.Name):
        argument = module.assigned(argument.id, context)
    return argument


def _commands_of(node: ast.expr | None, line: int) -> Iterator[Command]:
    if isinstance(node, ast.List | ast.Tuple):
        words = tuple(_text(item) for item in node.elts)
        yield Command(line, words)
        if words[:1] and words[0] in ("bash", "sh") and len(words) > 2:
            yield from commands(words[2], line=line)
    elif node is not None and (text := _text(node)):
        yield from commands(text, line=line)


def _text(node: ast.expr) -> str:
    """Return the text of a string or a sum of strings; '' for any other expression.

    Unknown parts become `…`, but an unknown first term of a sum is omitted.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + (_text(node.right) or "…")
    return ""


def _expects_failure(module: Module, node: ast.AST) -> bool:
    return any(name is None or name.rpartition(".")[2] in _EXPECTED for name in module.expected(node))


def _settings(command: Command) -> Iterator[tuple[str, str]]:
    for assigned in command.assigned:
        name, _, value = assigned.partition("=")
        yield name.rstrip("+"), value


def _pip(words: tuple[str, ...]) -> list[str] | None:
    """Return the arguments of `pip install`, `uv pip install`, `uv add` or `python -m pip install`, or else None."""
    names = [word.rpartition("/")[2] for word in words[:5]]
    if names[:2] == ["uv", "add"]:
        return [*words[2:]]
    for number, name in enumerate(names[:4]):
        if _PIP.match(name) and "install" in words[number + 1 : number + 4]:
            return [*words[words.index("install", number) + 1 :]]
    return None


def _installed(arguments: list[str], line: int) -> Iterator[Place]:
    if "--no-deps" in arguments and not any("+cu" in word for word in arguments):
        return
    waiting = iter(arguments)
    for word in waiting:
        option, _, value = word.partition("=")
        if option in _INDEXES:
            yield from requirements.of_index(f"{option} {value or next(waiting, '')}", line)
        elif word in _VALUES:
            next(waiting, None)
        elif not word.startswith(("-", ">", "<", "&", "2>", ".", "/", "$")):
            yield from requirements.of_requirement(word, line)


def _container(words: tuple[str, ...], line: int) -> Iterator[Place]:
    if "run" not in words and "create" not in words:
        return
    for number, word in enumerate(words):
        following = words[number + 1] if number + 1 < len(words) else ""
        if word == "--gpus" or word.startswith("--gpus="):
            yield Place(CONTAINER, line, f"--gpus {following}" if word == "--gpus" else word)
        elif word == "--runtime=nvidia" or (word == "--runtime" and following == "nvidia"):
            yield Place(CONTAINER, line, "--runtime=nvidia")
