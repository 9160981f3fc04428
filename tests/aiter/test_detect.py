"""AMD's aiter is detected; without it, or with the unrelated package of that name, the reason is one sentence."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap

import pytest

from hf_rocm.ops.aiter import detect


def outcome(folder, *, before=""):
    """Call `detect.load` in a fresh process. Returns (the result, whether aiter was imported).

    folder: the first entry of the import path. before: code that runs first.
    """
    script = f"""
    import sys
    sys.path.insert(0, {str(folder)!r})
    {before}
    from hf_rocm.ops.aiter import detect
    first, second = detect.load(), detect.load()
    assert first is second
    print(first)
    print("aiter" in sys.modules)
    """
    paths = f"import sys; sys.path[:] = {sys.path!r}\n"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", paths + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    sentence, imported = result.stdout.strip().splitlines()[-2:]
    return sentence, imported == "True"


def package(folder, name, version, files):
    """Write a package `aiter` with metadata."""
    for path, text in files.items():
        file = folder / "aiter" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


AMD = {"jit/core.py": "", "ops/mha.py": ""}


def test_the_asyncio_package_aiter_is_not_mistaken_for_amds(tmp_path):
    package(tmp_path, "aiter", "0.13.20191203", {"__init__.py": "raise AssertionError('imported')"})
    sentence, imported = outcome(tmp_path)
    assert sentence.startswith("the installed package is not AMD's aiter: ")
    assert "pip uninstall aiter" in sentence and not imported


def test_a_failed_import_is_a_reason_and_is_not_repeated(tmp_path):
    fails = "import sys\nsys.path.insert(0, 'polluted')\nraise RuntimeError('ROCm version file not found\\nmore')"
    package(tmp_path, "amd-aiter", "0.1.9", {**AMD, "__init__.py": fails})
    before = "import atexit; atexit.register(lambda: sys.stderr.write('' if 'polluted' == sys.path[-1] else 'first'))"
    sentence, _ = outcome(tmp_path, before=before)
    assert sentence == "amd-aiter 0.1.9 can't be imported here: RuntimeError: ROCm version file not found"


def test_a_build_that_exits_at_import_does_not_end_the_program(tmp_path):
    package(tmp_path, "amd-aiter", "0.1.9", {**AMD, "__init__.py": "raise SystemExit('[aiter] build failed')"})
    sentence, _ = outcome(tmp_path)
    assert sentence == "amd-aiter 0.1.9 can't be imported here: SystemExit: [aiter] build failed"


def test_a_missing_aiter_is_a_reason(tmp_path, monkeypatch):
    from hf_rocm.overlay.facts import AiterFacts

    monkeypatch.setattr(detect, "aiter_facts", lambda: AiterFacts())
    assert detect.load.__wrapped__() == "aiter is not installed (scripts/install-aiter, or pip install amd-aiter)"


def test_importing_the_ops_imports_no_aiter():
    script = f"import sys; sys.path[:] = {sys.path!r}; import hf_rocm.ops; assert 'aiter' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_real_package_is_found_and_logs_only_warnings(kernels, caplog):
    release = detect.release()
    assert release.name == "amd-aiter 0.1.7.post2.dev18" and release.at_least("0.1.6.post2")
    assert not release.at_least("0.1.7.post2")
    caplog.set_level(logging.DEBUG)
    logging.getLogger("aiter").info("a line for every new shape")
    logging.getLogger("aiter").warning("something is wrong")
    assert [record.message for record in caplog.records] == ["something is wrong"]


def test_aiters_additions_to_the_path_are_moved_to_the_end(kernels):
    import torch

    added = [index for index, entry in enumerate(sys.path) if "aiter_meta" in entry or entry.endswith("jit/utils/")]
    own = next(index for index, entry in enumerate(sys.path) if entry and torch.__file__.startswith(entry + "/"))
    assert added and min(added) > own


def test_an_invalid_version_counts_as_old():
    assert detect._version("unknown") is None and detect._version(None) is None
    assert not detect.Release(None, lambda name: None, lambda name: None).at_least("0.0.1")


@pytest.mark.parametrize(("text", "line"), [("a\nb", "a"), ("", "no message")])
def test_the_reason_is_the_first_line_of_the_message(text, line):
    assert detect._first_line(RuntimeError(text)) == line
