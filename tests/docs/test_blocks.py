"""What the documentation tells people to type: Python blocks are run, command lines are parsed by the real parsers."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]*) -->\n+)?```python\n(?P<code>.*?)```", re.DOTALL)
_COMMAND = re.compile(
    r"^(?:    |\| *`?)?((?:[A-Z_]+=\S+ )*(?:hf-rocm|python -m hf_rocm(?:\.\w+)?|scripts/[\w-]+)(?: .*)?)$"
)


def blocks() -> list[object]:
    found = []
    for page in PAGES:
        for number, block in enumerate(_BLOCK.finditer(page.read_text(encoding="utf-8")), 1):
            marks = [pytest.mark.skip(reason=f"not run: {block['why']}")] if block["why"] else []
            found.append(pytest.param(page, block["code"], id=f"{page.stem}-{number}", marks=marks))
    return found


def commands() -> list[object]:
    found = {}
    for page in PAGES:
        inside = False
        for line in page.read_text(encoding="utf-8").splitlines():
            inside = inside != line.startswith("```")
            if line.startswith("    ") or inside:
                match = _COMMAND.match(line if line.startswith("    ") else f"    {line}")
                if match and not line.startswith("```"):
                    command = re.split(r"\s{2,}#|\s#\s", match[1])[0].strip()
                    found.setdefault(command, pytest.param(command, id=f"{page.stem}: {command}"))
    return list(found.values())


@pytest.fixture
def page_names(tiny_checkpoint, monkeypatch, tmp_path):
    """What a page's code may take for granted: a loaded model with its tokenizer and inputs, and the forced path."""
    import transformers

    import hf_rocm

    monkeypatch.setenv("HF_ROCM_FORCE", "1")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    inputs = tokenizer("the value of", return_tensors="pt")
    yield {"hf_rocm": hf_rocm, "torch": torch, "model": model, "tokenizer": tokenizer, "inputs": inputs}
    hf_rocm.auto_prepare(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("page", "code"), blocks())
def test_a_python_block_runs(page, code, page_names, tiny_checkpoint):
    exec(compile(code.replace('"model-id"', repr(str(tiny_checkpoint))), f"{page.name}", "exec"), page_names)


@pytest.mark.parametrize("command", commands())
def test_a_command_line_is_one_that_exists(command):
    words = shlex.split(re.sub(r"[\[\]…|]|\.\.\.", " ", command))
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if words[0].startswith("scripts/"):
        known = _script_options(words[0])
        for word in words[1:]:
            if word == "--":
                break
            assert not word.startswith("--") or word.split("=")[0] in known, f"{words[0]} knows no {word}"
        return
    if words[:2] == ["python", "-m"]:
        if words[2] != "hf_rocm":
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists()
            return
        words = words[2:]
    _parse(words[1:])


def _parse(words: list[str]) -> None:
    """As far as the option parser goes; nothing runs."""
    from hf_rocm.cli.app import build

    command = typer.main.get_command(build())
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    inner = getattr(command, "commands", None)
    if inner is not None and words and words[0] != "--help":  # whatever is no command is a model or its options
        assert "model" in inner or words[0].startswith("-"), f"there is no command {words[0]}"
        command = inner.get("model", command)
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0] in known, f"{command.name} knows no {word}"


def _script_options(script: str) -> set[str]:
    """The options that a script's own text names."""
    file = ROOT / script
    assert file.exists() and os.access(file, os.X_OK), script
    texts = [file.read_text(encoding="utf-8")]
    texts += [each.read_text(encoding="utf-8") for each in (ROOT / "scripts" / "lib").glob("*.py")]
    return set(re.findall(r"--[a-z][\w-]*", "\n".join(texts))) | {"--help"}


@pytest.mark.slow
def test_the_reference_is_what_the_sources_say_and_the_site_has_no_broken_link(tmp_path):
    pytest.importorskip("mkdocs", reason="not run: needs mkdocs")
    code = (
        "import sys; from pathlib import Path; import lib.docs_site as site; from lib.reference import pages;"
        "stale = [str(f) for f, text in pages().items() if f.read_text(encoding='utf-8') != text];"
        "sys.exit(f'run scripts/build-docs: {stale}') if stale else None;"
        f"sys.exit(site.build(Path({str(tmp_path)!r})))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists() and (tmp_path / "reference" / "commands.html").exists()
