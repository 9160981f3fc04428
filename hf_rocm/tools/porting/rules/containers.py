"""Dockerfiles, compose files and conda environments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from hf_rocm.tools.porting.findings import Place, Rule, Severity
from hf_rocm.tools.porting.rules import building, commands, requirements
from hf_rocm.tools.porting.shell import Command
from hf_rocm.tools.porting.shell import commands as commands_of

IMAGE = Rule(
    "nvidia-base-image",
    Severity.PROBLEM,
    "the image contains CUDA and CUDA builds of its packages, which an AMD GPU can't run",
    "rocm/pytorch:latest, rocm/dev-ubuntu-24.04 or another image from AMD (hub.docker.com/u/rocm)",
)

_IMAGE = re.compile(
    r"^(?:docker\.io/)?(?:nvidia/(?:cuda|cudagl|opengl)\b|nvcr\.io/nvidia/|pytorch/(?:pytorch|manylinux)\S*cuda|"
    r"pytorch/\S*[-:]cu\d|tensorflow/tensorflow:\S*gpu|\S+[:-]cu(?:da)?-?1[0-3]\b)"
)
_ROCM = re.compile(r"rocm|\bamd\b|_amd\b", re.IGNORECASE)
_INSTRUCTION = re.compile(r"^\s*([A-Za-z]+)\s+(.*)$", re.DOTALL)
_ASSIGNED = re.compile(r"""(\w+)=("(?:\\.|[^"\\])*"|'[^']*'|[^\s]*)""")
_ENTRY = re.compile(r"^\s*-\s+[\"']?([^\"'#]+?)[\"']?\s*(?:#.*)?$")
_COMPOSE = re.compile(r"^\s*(?:-\s+)?(runtime|driver|image):\s*[\"']?([^\"'#\s]+)")


def of_dockerfile(text: str) -> Iterator[Place]:
    """Check FROM, ARG and ENV, and the shell commands in RUN, CMD and ENTRYPOINT."""
    instructions = list(_instructions(text))
    variants = any(word == "FROM" and _ROCM.search(body) for word, body, _ in instructions)
    for word, body, line in instructions:
        if word in ("FROM", "ARG"):
            image = body.partition("=")[2].strip("\"' \n") if word == "ARG" else _image_of(body)
            if _IMAGE.match(image) and not variants:
                yield Place(IMAGE, line, f"{word} {body.strip()}")
        if word in ("ENV", "ARG"):
            pairs = _ASSIGNED.findall(body) if "=" in body else [(body.split()[0], body.partition(" ")[2])]
            for name, value in pairs:
                yield from building.of_setting(name, value.strip("\"'"), line)
        elif word in ("RUN", "CMD", "ENTRYPOINT"):
            for command in _of_run(body, line):
                yield from commands.of_command(command)


def _image_of(body: str) -> str:
    return next((word for word in body.split() if not word.startswith("--")), "")


def _of_run(body: str, line: int) -> Iterator[Command]:
    if body.lstrip().startswith("["):
        try:
            words = json.loads(body)
        except ValueError:
            return
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            yield Command(line, tuple(words))
        return
    yield from commands_of(re.sub(r"^(\s*--\w+=\S+)+", lambda match: " " * len(match[0]), body), line=line)


def _instructions(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield (word, rest, line) for each instruction, with its line breaks.

    A backslash replaces each comment and each empty line within an instruction.
    """
    kept: list[str] = []
    # The first line of the current instruction, and the word that ends its here-document.
    start, end = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if end:
            kept.append(line if line.strip() != end else "")
            end = "" if line.strip() == end else end
            continues = bool(end)
        else:
            blank = line.lstrip().startswith("#") or (bool(kept) and not line.strip())
            if not kept and (blank or not line.strip()):
                continue
            start = start if kept else number
            heredoc = re.search(r"<<-?['\"]?(\w+)", line) if not kept else None
            if heredoc and re.match(r"\s*RUN\s+<<", line):
                end, line = heredoc[1], line[: heredoc.start()]
            kept.append("\\" if blank else line)
            continues = bool(end) or blank or line.rstrip().endswith("\\")
        if not continues:
            yield from _instruction(kept, start)
            kept = []
    if kept:
        yield from _instruction(kept, start)


def _instruction(lines: list[str], start: int) -> Iterator[tuple[str, str, int]]:
    match = _INSTRUCTION.match("\n".join(lines))
    if match:
        yield match[1].upper(), match[2], start


def of_compose(text: str) -> Iterator[Place]:
    """Check the images and device reservations in a compose file."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _COMPOSE.match(line):
            if match[1] == "image" and _IMAGE.match(match[2]) and not _ROCM.search(match[2]):
                yield Place(IMAGE, number, f"image: {match[2]}")
            elif match[1] != "image" and match[2] == "nvidia":
                yield Place(commands.CONTAINER, number, f"{match[1]}: nvidia")


def of_environment(text: str) -> Iterator[Place]:
    """Check the packages in a conda environment, including those from pip."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _ENTRY.match(line):
            entry = match[1].strip()
            if commands.CONDA.match(entry):
                yield Place(commands.SYSTEM, number, entry)
            elif entry.startswith("--"):
                yield from requirements.of_index(entry, number)
            else:
                yield from requirements.of_requirement(entry, number)
