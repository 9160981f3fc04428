"""The source of transformers' own tests, and the folder in which they run.

A release's source distribution contains only the shared mixins. The tests of the models and of `generation/` are only
in the public repository; to run them, a checkout must be passed. Otherwise the mixins are applied to the thin classes
in tests/upstream. This repository contains no file of transformers.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lib.console import ScriptError, step
from lib.environments import ENVIRONMENTS, ROOT, Environment, clean_environ

PREPARED = ROOT / "tests" / "upstream"
FETCHED = ENVIRONMENTS / "upstream"

# sha256 of transformers-<release>.tar.gz on the package index, for the releases for which it was recorded
RECORDED = {
    "4.57.6": "55e44126ece9dc0a291521b7e5492b572e6ef2766338a610b9ab5afbb70689d3",
    "5.23.0": "19d647a4d5d903a7c644ca5cde2d86efc3dde7d8c687ae7988806ff2205efa71",
}

CONFIGURATION = "[pytest]\naddopts =\nfilterwarnings =\n"


def source_distribution(release: str, builder: Environment) -> Path:
    """The folder with the tests of a release's source distribution, which is downloaded once.

    builder: an environment with pip. Raises `ScriptError` if the distribution can't be downloaded, or if its hash
    differs from the recorded one.
    """
    folder = fetched(release)
    if folder is not None:
        return folder
    FETCHED.mkdir(parents=True, exist_ok=True)
    with step(f"source distribution of transformers {release}"), tempfile.TemporaryDirectory(dir=FETCHED) as scratch:
        archive = _download(release, builder, Path(scratch))
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != RECORDED.get(release, digest):
            raise ScriptError(
                f"the source distribution of transformers {release} differs from the recorded one\n"
                f"  expected  {RECORDED[release]}\n  found     {digest}"
            )
        unpacked = Path(scratch) / "unpacked"
        with tarfile.open(archive) as content:
            root = f"transformers-{release}/tests/"
            members = [member for member in content if member.isfile() and member.name.startswith(root)]
            for member in members:
                target = unpacked / "tests" / Path(member.name.removeprefix(root)).name
                target.parent.mkdir(parents=True, exist_ok=True)
                stream = content.extractfile(member)
                assert stream is not None
                target.write_bytes(stream.read())
        unpacked.replace(FETCHED / f"transformers-{release}")
    folder = fetched(release)
    assert folder is not None
    return folder


def fetched(release: str) -> Path | None:
    """The folder that `source_distribution` downloaded, or None."""
    folder = FETCHED / f"transformers-{release}" / "tests"
    return folder if (folder / "test_modeling_common.py").is_file() else None


def from_checkout(target: Path, checkout: Path, models: Sequence[str], *, mixins: Path | None = None) -> list[str]:
    """Copy a checkout's tests/ and utils/ to `target`. mixins: the release's modules, which replace the checkout's.

    The checkout's conftest.py is not copied: it configures doctests and the Hub's cache, and requires pytest plugins.
    Returns the models' own test files, relative to `target`. Raises `ScriptError` if a model has none, or if the
    checkout is not a source tree of transformers.
    """
    tests = checkout / "tests"
    if not (tests / "test_modeling_common.py").is_file():
        raise ScriptError(f"this is not a source tree of transformers\n  path  {checkout}")
    files = [_file(model) for model in models]
    missing = [model for model, file in zip(models, files, strict=True) if not (checkout / file).is_file()]
    if missing:
        raise ScriptError(f"the source tree has no modeling tests of {', '.join(missing)}\n  path  {checkout}")
    _begin(target)
    # The tests import modules of utils/.
    for folder in ("tests", "utils"):
        if (checkout / folder).is_dir():
            shutil.copytree(checkout / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    if mixins is not None:
        shutil.copytree(mixins, target / "tests", dirs_exist_ok=True)
        # Newer mixins import these modules.
        for standin in sorted((PREPARED / "standins").rglob("*.py")):
            copy = target / "tests" / standin.relative_to(PREPARED / "standins")
            if not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(standin, copy)
    return files


def from_mixins(target: Path, mixins: Path, models: Sequence[str]) -> list[str]:
    """Copy the release's mixins, stand-ins for other modules that they import, and thin classes to `target`.

    Returns the thin test files, relative to `target`. Raises `ScriptError` for a model that has neither a
    thin class nor an overlay.
    """
    thin = {model: _thin(model) for model in models}
    _begin(target)
    shutil.copytree(PREPARED / "standins", target / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(mixins, target / "tests", dirs_exist_ok=True)
    shutil.copy2(PREPARED / "thin" / "common.py", target / "tests" / "thin.py")
    for model in models:
        file = target / _file(model)
        file.parent.mkdir(parents=True)
        file.write_text(thin[model], encoding="utf-8")
    for folder in {path.parent for path in (target / "tests").rglob("*.py")} | {target / "tests" / "models"}:
        (folder / "__init__.py").touch()
    return [_file(model) for model in models]


def _thin(model: str) -> str:
    """The thin test class of a model: from tests/upstream/thin, or a generated one for an ordinary causal model."""
    file = PREPARED / "thin" / f"{model}.py"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if not any((ROOT / "overlays").glob(f"*/models/{model}")):
        raise ScriptError(
            f"there is no overlay of {model}, and no thin test class\n  path  {file}\n\n"
            "hint: pass the name of the model's folder in transformers/models"
        )
    name = model.title().replace("_", "")
    return (
        "import unittest\n\nfrom ...thin import CausalTest\n\n\n"
        f"class {name}ModelTest(CausalTest, unittest.TestCase):\n    model_type = {model!r}\n"
    )


def model_of(test: str) -> str:
    """The model to which a test belongs, from the test's node id."""
    return test.split("/")[2]


def _file(model: str) -> str:
    return f"tests/models/{model}/test_modeling_{model}.py"


def _begin(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / "pytest.ini").write_text(CONFIGURATION)


def _download(release: str, builder: Environment, folder: Path) -> Path:
    """Download with pip, which uses the configured index. pip prepares the metadata and builds nothing."""
    command = [str(builder.python), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "transformers", "--dest", str(folder), f"transformers=={release}"]
    result = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, check=False)
    archive = folder / f"transformers-{release}.tar.gz"
    if result.returncode or not archive.is_file():
        stderr = result.stderr.strip()[-1000:]
        raise ScriptError(f"the source distribution of transformers {release} could not be downloaded\n\n{stderr}")
    return archive
