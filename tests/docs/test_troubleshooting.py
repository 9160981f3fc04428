"""The pages on troubleshooting and containers: every warning and problem of doctor is explained, doctor prints every
quoted line, and the commands of the Dockerfile exist.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from hf_rocm.tools.doctor import checks, examine
from tests.tools import recorded
from tests.tools.recorded import Recorded

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
DOCKER = (ROOT / "docs" / "docker.md").read_text(encoding="utf-8")
INSTRUCTIONS = {"ARG", "FROM", "RUN", "ENV", "COPY", "VOLUME", "CMD", "WORKDIR", "USER", "ENTRYPOINT", "LABEL"}


def names() -> set[str]:
    """The names of all warnings and problems, read from the checks' sources."""
    named = set()
    for check in checks.CHECKS:
        for node in ast.walk(ast.parse(Path(inspect.getsourcefile(check) or "").read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("problem", "warning"):
                assert isinstance(node.args[0], ast.Constant), ast.unparse(node)
                named.add(node.args[0].value)
    return named


def test_every_warning_and_problem_is_explained() -> None:
    assert len(names()) > 20
    missing = {name for name in names() if f"`{name}`" not in PAGE and not re.search(rf"^\w+  {name}  ", PAGE, re.M)}
    assert not missing


def test_every_check_on_the_page_exists() -> None:
    # `patches` is a check that never reports a warning or a problem.
    existing = names() | {"patches"}
    for named in re.findall(r"[Cc]hecks? ((?:`[\w-]+`(?:, | and )?)+)", PAGE):
        assert set(re.findall(r"`([\w-]+)`", named)) <= existing, named


def test_doctor_prints_every_quoted_line() -> None:
    printed = set()
    for name in recorded.NAMES:
        printed |= {
            (finding.level.value, finding.check, finding.what)
            for finding in examine.doctor(machine=Recorded(name)).findings
        }
    quoted = re.findall(r"^(problem|warning)  ([\w-]+)  (.+)$", PAGE, re.M)
    assert len(quoted) > 12
    for level, check, text in quoted:
        assert any((level, check) == line[:2] and line[2].startswith(text) for line in printed), text


@pytest.fixture(scope="module")
def dockerfile() -> list[tuple[str, str]]:
    """The (instruction, arguments) pairs of the Dockerfile, without comments and with continued lines joined."""
    (text,) = re.findall(r"```dockerfile\n(.*?)```", DOCKER, re.S)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def test_the_dockerfile_is_well_formed(dockerfile: list[tuple[str, str]]) -> None:
    assert {word for word, _ in dockerfile} <= INSTRUCTIONS
    assert [word for word, _ in dockerfile][:2] == ["ARG", "FROM"] and dockerfile[-1][0] == "CMD"
    for word, text in dockerfile:
        if word in ("CMD", "VOLUME"):
            assert all(isinstance(argument, str) for argument in json.loads(text))
        if word == "RUN":
            assert subprocess.run(["sh", "-n", "-c", text], check=False).returncode == 0, text
        if word == "ENV":
            assert re.fullmatch(r"[A-Z_]+=\S+", text), text


def test_commands_of_the_dockerfile_exist_and_its_variables_are_read(dockerfile: list[tuple[str, str]]) -> None:
    from tests.docs.test_blocks import _parse

    commands = [json.loads(text) for word, text in dockerfile if word == "CMD"]
    for word, text in dockerfile:
        if word == "RUN":
            commands += [shlex.split(part) for part in re.split(r" (?:&&|\|\||\|) ", text)]
    shown = [words for words in commands if words[0] == "hf-rocm"]
    assert ["hf-rocm", "install-overlays"] in shown and ["hf-rocm", "doctor"] in shown
    for words in shown:
        _parse(words[1:])
    (script,) = (words for words in commands if words[-3:-2] == ["/opt/hf_rocm/scripts/install-aiter"])
    assert (ROOT / "scripts" / "install-aiter").exists() and script[-2:] == ["--arch", "${AITER_FOR}"]
    assert ["python", "-m", "hf_rocm.check_version"] in commands and (ROOT / "hf_rocm" / "check_version.py").exists()
    variables = {text.split("=")[0] for word, text in dockerfile if word == "ENV"}
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hf_rocm").rglob("*.py"))
    assert all(name in sources for name in variables - {"PIP_CONSTRAINT", "TRITON_CACHE_DIR"}), variables


def test_pip_keeps_the_torch_of_the_image(dockerfile: list[tuple[str, str]]) -> None:
    """Match the Dockerfile's pattern against the packages that pip lists in an image with a ROCm build of PyTorch."""
    (pattern,) = re.findall(r"grep -iE '([^']+)'", " ".join(text for _, text in dockerfile))
    listed = ["torch==2.9.1+rocm7.1", "torchvision==0.24", "torchmetrics==1.8", "triton==3.5", "numpy==2", "mytorch==1"]
    pinned = [line for line in listed if re.match(pattern, line, re.IGNORECASE)]
    assert pinned == ["torch==2.9.1+rocm7.1", "torchvision==0.24", "triton==3.5"]
