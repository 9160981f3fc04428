"""Overlay directories that were tampered with, and names that point outside their folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_rocm.errors import OverlayError
from hf_rocm.overlay import catalog as catalogs
from hf_rocm.overlay import manifest
from hf_rocm.overlay.catalog import Catalog
from hf_rocm.overlay.commands import install
from hf_rocm.overlay.integrity import check_delivered
from tests.overlay.conftest import MODELS, Site, fingerprint, hashes
from tests.overlay.promises.world import encoded

Farm = Callable[[str], Site]


@pytest.fixture
def delivered(tmp_path: Path) -> Path:
    """hf-rocm's overlays as installed from a wheel into site-packages, with their RECORD."""
    overlays = tmp_path / "site-packages" / "hf_rocm" / "_overlays"
    shutil.copytree(catalogs.load().root, overlays, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = tmp_path / "site-packages" / "hf_rocm-0.1.0.dist-info"
    metadata.mkdir()
    files = [path for path in sorted(overlays.rglob("*")) if path.is_file()]
    site = overlays.parent.parent
    rows = [f"{path.relative_to(site).as_posix()},sha256={encoded(path.read_bytes())},1" for path in files]
    (metadata / "RECORD").write_text("\n".join(rows) + "\n")
    return overlays


def llama(overlays: Path) -> Path:
    return overlays / "transformers-4.53" / "models" / "llama" / "modeling_llama.py"


def link(overlays: Path) -> None:
    file = llama(overlays).rename(overlays.parent.parent / "elsewhere.py")
    llama(overlays).symlink_to(file)


def fifo(overlays: Path) -> None:
    llama(overlays).unlink()
    os.mkfifo(llama(overlays))


def other_range(overlays: Path) -> None:
    file = overlays / "transformers-4.53" / "manifest.toml"
    file.write_text(file.read_text().replace('transformers = ">=4.53,<6"', 'transformers = ">=4,<9"'))


def new_model(overlays: Path) -> None:
    folder = overlays / "transformers-4.53" / "models" / "unheard_of"
    folder.mkdir()
    (folder / "modeling_unheard_of.py").write_text("import os\n")


def case_folded(overlays: Path) -> None:
    shutil.copytree(llama(overlays).parent, llama(overlays).parent.with_name("Llama"))


TAMPERED: dict[str, Callable[[Path], object]] = {
    "text": lambda overlays: llama(overlays).write_bytes(llama(overlays).read_bytes() + b"import os\n"),
    "manifest": other_range,
    "gone": lambda overlays: llama(overlays).unlink(),
    "link": link,
    "pipe": fifo,
    "new model": new_model,
    "case-folded": case_folded,
    "macOS leftovers": lambda overlays: llama(overlays).with_name("._modeling_llama.py").write_bytes(b"\x00\x05"),
    "linked folder": lambda overlays: (overlays / "transformers-9.0").symlink_to(overlays / "transformers-4.53"),
}


INSTALL = """
import sys
from hf_rocm.errors import OverlayError
from hf_rocm.overlay.commands import install, uninstall
install(["bert"], transformers_path=sys.argv[1])
with open(sys.argv[2], "ab") as file:
    file.write(b"import os\\n")
try:
    install(transformers_path=sys.argv[1])
except OverlayError as error:
    print(error)
assert uninstall(transformers_path=sys.argv[1])[0].writes
"""


def test_17_the_overlays_of_the_wheel_pass(delivered: Path) -> None:
    check_delivered(delivered)
    (delivered / "transformers-4.53" / "__pycache__").mkdir()
    (delivered / "transformers-4.53" / "__pycache__" / "x.cpython-311.pyc").touch()
    check_delivered(delivered)


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED.keys())
def test_17_a_tampered_overlay_directory_is_refused(delivered: Path, tamper: Callable[[Path], object]) -> None:
    tamper(delivered)
    with pytest.raises(OverlayError, match="not what its package delivered") as refused:
        check_delivered(delivered)
    assert str(delivered) in refused.value.facts["file"] and "reinstall hf-rocm" in (refused.value.hint or "")


def test_17_a_tampered_overlay_is_never_written_and_uninstall_still_works(delivered: Path, farm: Farm) -> None:
    site = farm("one")
    package = Path(catalogs.__file__).parents[1]
    for path in package.iterdir():
        if path.name not in ("_overlays", "__pycache__"):
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, delivered.parent / path.name)
    path = os.pathsep.join([str(delivered.parent.parent), *(entry for entry in sys.path if entry)])
    before = hashes(site.path)
    result = subprocess.run(
        [sys.executable, "-c", INSTALL, str(site.path), str(llama(delivered))],
        env={**os.environ, "PYTHONPATH": path}, cwd=site.path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert str(llama(delivered)) in result.stdout and "reinstall hf-rocm" in result.stdout
    assert hashes(site.path) == before, "a tampered overlay was written, or a file was not restored"


@pytest.mark.parametrize(
    "name", ["..", "../llama", "/etc/passwd", "llama\0", "Llama", "llama/../bert", "", ".", "lla ma", "ﬁ"]
)
def test_17_and_24_a_models_name_never_leaves_its_folder(farm: Farm, name: str) -> None:
    site = farm("one")
    before = fingerprint(site.path)
    with pytest.raises(OverlayError, match="has no overlay for"):
        install([name, "llama"], transformers_path=site.path)
    assert fingerprint(site.path) == before


@pytest.mark.parametrize(
    "name", ["transformers./etc/passwd:x", "transformers.models...x:y", "os:system", "transformers.a:b\0", "/etc:x"]
)
def test_17_a_manifests_name_never_leaves_transformers(name: str) -> None:
    escaped = name.replace("\0", "\\u0000")
    text = f'transformers = ">=5"\n[llama.files]\n[llama.names."{escaped}"]\n"{"0" * 16}" = ["5.4.0"]\n'
    with pytest.raises(OverlayError, match="manifest can't be read"):
        manifest.parse(text, source="there")


@pytest.mark.parametrize("text", ["def (:\n", "x = '\0'\n", "\xff", '__all__ = ["x"]\n', "# >>> hf-rocm overlay >>>\n"])
def test_17_an_overlay_that_would_break_the_file_is_refused(farm: Farm, tmp_path: Path, text: str) -> None:
    site = farm("one")
    overlays = tmp_path / "overlays"
    shutil.copytree(catalogs.load().root, overlays)
    for file in overlays.rglob("modeling_llama.py"):
        file.write_bytes(text.encode("latin-1"))
    before = fingerprint(site.path)
    with pytest.raises(OverlayError) as refused:
        install(MODELS, transformers_path=site.path, catalog=Catalog(overlays))
    assert "llama" in refused.value.message
    assert fingerprint(site.path) == before
