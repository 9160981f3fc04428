"""The code in the documentation: Python blocks and cheap commands run, and the options of all command lines exist."""

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
_BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]*) -->\n+)?```python\n(?P<code>.*?)```", re.DOTALL)
_COMMAND = re.compile(
    r"^(?:    |\| *`?)?(?:pip install [^&]*&& )?"
    r"((?:[A-Z_]+=\S+ )*(?:hf-rocm|python -m hf_rocm(?:\.\w+)?|scripts/[\w-]+)(?: .*)?)$"
)
_INLINE = re.compile(r"(?<!`)`((?:[A-Z_]+=\S+ )*(?:hf-rocm|scripts/[\w-]+)(?: [^`]*)?)`(?!`)")

# Command lines that run here as pasted, with their exit codes on a machine without an AMD GPU. PATH is a file in which
# port-check finds a problem, and MODEL is a small checkpoint.
RUN = {
    "hf-rocm doctor MODEL": 1,
    "hf-rocm status": 0,
    "hf-rocm explain MODEL": 0,
    "hf-rocm port-check PATH": 1,
    "hf-rocm port-check PATH --all": 1,
    "hf-rocm port-check PATH --json": 1,
    "hf-rocm tune list": 0,
}
# The prefixes of all other command lines, with the reasons why they don't run here and the tests that run them.
NOT_RUN = {
    "hf-rocm install-overlays": "it writes to the environment; tests/cli/test_commands.py runs it on copies",
    "hf-rocm uninstall-overlays": "it writes to the environment; tests/cli/test_commands.py runs it on copies",
    "hf-rocm status --diff": "it needs the wheel of another release; tests/overlay/test_newer_release.py creates one",
    "python -m hf_rocm": "it reads the environment's overlays; tests/cli/test_check_version.py runs it on copies",
    "hf-rocm warmup": "it builds kernels; tests/cli/test_model_commands.py",
    "hf-rocm env": "it examines the machine as doctor does; tests/cli/test_env.py",
    "hf-rocm doctor": "it is run above with a model; tests/cli/test_doctor.py",
    "hf-rocm verify": "it takes up to a minute; tests/cli/test_verify.py",
    "hf-rocm bench": "it takes minutes; tests/cli/test_bench.py and tests/tools/bench/serving",
    "hf-rocm tune": "it needs a GPU or tables; tests/tools/tuning",
    "hf-rocm quantize": "it loads and quantises a model; tests/cli/test_quantize.py",
    "hf-rocm port-check": "a reference to the command in general; tests/tools/porting",
    "hf-rocm explain": "a reference to the command in general; tests/cli/test_model_commands.py",
    "scripts/": "they prepare, test or render this checkout; tests/scripts and tests/overlay/test_scripts.py",
}


def blocks() -> list[object]:
    blocks_read = []
    for page in PAGES:
        for number, block in enumerate(_BLOCK.finditer(page.read_text(encoding="utf-8")), 1):
            marks = [pytest.mark.skip(reason=f"not run: {block['reason']}")] if block["reason"] else []
            blocks_read.append(pytest.param(page, block["code"], id=f"{page.stem}-{number}", marks=marks))
    return blocks_read


def commands() -> list[object]:
    lines = {}
    for page in PAGES:
        inside = False
        for line in page.read_text(encoding="utf-8").splitlines():
            inside = inside != line.startswith("```")
            for match in _INLINE.finditer(line):
                lines.setdefault(
                    match[1].strip(), pytest.param(match[1].strip(), id=f"{page.stem}: {match[1].strip()}")
                )
            if line.startswith("    ") or inside:
                match = _COMMAND.match(line if line.startswith("    ") else f"    {line}")
                if match and not line.startswith("```"):
                    command = re.split(r"\s{2,}#|\s#\s", match[1])[0].strip()
                    lines.setdefault(command, pytest.param(command, id=f"{page.stem}: {command}"))
    return list(lines.values())


@pytest.fixture
def page_names(tiny_checkpoint, monkeypatch, tmp_path):
    """The names that a page's code may use: hf_rocm, torch, a model, its tokenizer and inputs. HF_ROCM_FORCE is set."""
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
def test_a_command_line_exists(command):
    words = shlex.split(re.sub(r"[\[\]…|]|\.\.\.", " ", command))
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if words[0].startswith("scripts/"):
        options = _script_options(words[0])
        for word in words[1:]:
            if word == "--":
                break
            assert not word.startswith("--") or word.split("=")[0] in options, f"{words[0]} has no option {word}"
        return
    if words[:2] == ["python", "-m"]:
        if words[2] != "hf_rocm":
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists()
            return
        words = words[2:]
    _parse(words[1:])


def test_every_command_line_runs_here_or_in_a_named_test():
    written = [re.sub(r"^(?:[A-Z_]+=\S+ )+", "", parameter.values[0]) for parameter in commands()]
    left = [line for line in written if line not in RUN and not line.startswith(tuple(NOT_RUN))]
    assert not [line for line in left if line != "hf-rocm"]
    assert not set(RUN) - set(written), "no page has this line"
    for words, reason in NOT_RUN.items():
        assert any(line.startswith(words) for line in written), words
        for name in re.findall(r"tests/[\w/.]+\w", reason):
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("command", RUN)
def test_a_cheap_command_runs_as_pasted(command, tiny_checkpoint, tmp_path, monkeypatch, capsys):
    from hf_rocm.cli import main

    (tmp_path / "model.py").write_text("import pynvml\n", encoding="utf-8")
    monkeypatch.setenv("HF_ROCM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_ROCM_FORCE", raising=False)
    arguments = {"MODEL": str(tiny_checkpoint), "PATH": str(tmp_path / "model.py")}
    words = [arguments.get(word, word) for word in shlex.split(command)]
    if torch.version.hip is not None and words[1] == "doctor":
        pytest.skip("not run: the exit code depends on the machine")
    assert main(words[1:]) == RUN[command]
    assert capsys.readouterr().out.strip()


def _parse(words: list[str]) -> None:
    """Check that the command and its options exist, without running it."""
    from hf_rocm.cli.app import build

    command = typer.main.get_command(build())
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    inner = getattr(command, "commands", None)
    # The next word is not a subcommand, but a model or an option.
    if inner is not None and words and words[0] != "--help":
        assert "model" in inner or words[0].startswith("-"), f"there is no command {words[0]}"
        command = inner.get("model", command)
    options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0] in options, f"{command.name} has no option {word}"


def _script_options(script: str) -> set[str]:
    """The options that occur in the text of a script or of scripts/lib."""
    file = ROOT / script
    assert file.exists() and os.access(file, os.X_OK), script
    texts = [file.read_text(encoding="utf-8")]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "scripts" / "lib").glob("*.py")]
    return set(re.findall(r"--[a-z][\w-]*", "\n".join(texts))) | {"--help"}


@pytest.mark.slow
def test_the_reference_matches_the_sources_and_the_site_has_no_broken_link(tmp_path):
    pytest.importorskip("mkdocs", reason="not run: needs mkdocs")
    code = (
        "import sys; from pathlib import Path; import lib.docs_site as site; from lib.reference import pages;"
        "stale = [str(f) for f, text in pages().items() if f.read_text(encoding='utf-8') != text];"
        "sys.exit(f'run scripts/build-docs: {stale}') if stale else None;"
        f"sys.exit(site.build(Path({str(tmp_path)!r})))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), *filter(None, sys.path)])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "index.html").exists() and (tmp_path / "reference" / "commands.html").exists()
