"""Locating the transformers installation to write to, and every refusal with its fix."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from hf_rocm.errors import OverlayError
from hf_rocm.overlay.locate import check_writable, locate
from tests.overlay.conftest import Site, installed_package

_find_spec = PathFinder.find_spec


@pytest.fixture
def path_only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that sets the search path to the given folders only, and hides the virtual environment."""

    def use(*folders: Path) -> None:
        monkeypatch.setattr(sys, "path", [str(folder) for folder in folders])
        monkeypatch.setattr("importlib.util.find_spec", lambda name: _find_spec(name, sys.path))
        monkeypatch.setattr(sys, "prefix", sys.base_prefix)

    return use


def refusal(path: Path | None = None) -> OverlayError:
    with pytest.raises(OverlayError) as refused:
        check_writable(locate(path))
    assert refused.value.hint, "the refusal names no next step"
    return refused.value


def test_the_installed_transformers_is_located() -> None:
    result = locate()
    assert result.root == installed_package()
    assert result.metadata is not None and result.version in result.metadata.name


def test_a_path_may_be_the_package_or_its_parent(site: Site) -> None:
    assert locate(site.path).root == locate(site.root).root == site.root
    check_writable(locate(site.path))


def test_a_path_without_transformers_is_refused(tmp_path: Path) -> None:
    assert "no transformers at this path" in refusal(tmp_path).message


def test_hashes_are_read_from_record(site: Site) -> None:
    import hashlib

    installation = site.installation
    file = site.model("llama")
    assert installation.recorded_sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert installation.recorded_sha256(site.root / "nothing.py") is None


def test_a_search_path_without_transformers_is_refused(tmp_path: Path, path_only: Callable[..., None]) -> None:
    path_only(tmp_path)
    assert "not installed" in refusal().message


def test_a_folder_left_by_an_uninstall_is_refused(tmp_path: Path, path_only: Callable[..., None]) -> None:
    (tmp_path / "transformers" / "models").mkdir(parents=True)
    path_only(tmp_path)
    assert "only a leftover folder" in refusal().message


def test_a_zip_archive_is_refused(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zipimport import zipimporter

    archive = tmp_path / "site.zip"
    with zipfile.ZipFile(archive, "w") as target:
        target.write(site.root / "__init__.py", "transformers/__init__.py")
    monkeypatch.setattr("importlib.util.find_spec", zipimporter(str(archive)).find_spec)
    assert "archive" in refusal().message


def test_an_editable_install_is_refused(site: Site) -> None:
    (site.metadata / "direct_url.json").write_text(json.dumps({"url": "file:///src", "dir_info": {"editable": True}}))
    refused = refusal(site.path)
    assert "editable" in refused.message
    assert refused.facts["path"] == str(site.root)
    assert "direct_url.json" in refused.facts["found"]


def test_an_install_from_a_local_folder_is_not_editable(site: Site) -> None:
    (site.metadata / "direct_url.json").write_text(json.dumps({"url": "file:///src", "dir_info": {}}))
    check_writable(locate(site.path))


def test_an_editable_install_with_its_record_elsewhere_is_refused(
    make: Callable[[str], Site], tmp_path: Path, path_only: Callable[..., None]
) -> None:
    source, target = make("checkout"), tmp_path / "site-packages"
    target.mkdir()
    metadata = source.metadata.rename(target / source.metadata.name)
    (metadata / "direct_url.json").write_text(json.dumps({"url": "file:///src", "dir_info": {"editable": True}}))
    path_only(source.path, target)
    assert "editable" in refusal().message


@pytest.mark.parametrize("kind", ["folder", "worktree"])
def test_a_git_checkout_is_refused(make: Callable[[str], Site], tmp_path: Path, kind: str) -> None:
    source = make("checkout/src")
    git = tmp_path / "checkout" / ".git"
    git.mkdir() if kind == "folder" else git.write_text("gitdir: elsewhere")
    assert "checkout" in refusal(source.path).message


def test_an_unpacked_source_archive_is_refused(make: Callable[[str], Site], tmp_path: Path) -> None:
    source = make("transformers-1.2.3/src")
    (tmp_path / "transformers-1.2.3" / "setup.py").touch()
    assert "setup.py" in refusal(source.path).facts["found"]


def test_an_environment_inside_a_git_checkout_is_not_a_checkout(make: Callable[[str], Site], tmp_path: Path) -> None:
    site = make("project/lib/site-packages")
    (tmp_path / "project" / ".git").mkdir()
    check_writable(locate(site.path))


def test_a_symbolic_link_to_the_package_is_refused(site: Site, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "transformers").symlink_to(site.root)
    refused = refusal(tmp_path / "other")
    assert "symbolic link" in refused.message
    assert str(site.root) in refused.facts["found"]


def test_several_installations_on_the_search_path_are_refused(
    make: Callable[[str], Site], path_only: Callable[..., None]
) -> None:
    first, second = make("first"), make("second")
    path_only(first.path, second.path)
    refused = refusal()
    assert "more than one" in refused.message
    assert {str(first.root), str(second.root)} <= set(refused.facts.values())
    # Passing a path resolves the ambiguity.
    check_writable(locate(first.path))


def test_the_same_transformers_twice_on_the_path_is_accepted(
    site: Site, tmp_path: Path, path_only: Callable[..., None]
) -> None:
    (tmp_path / "link").symlink_to(site.path)
    path_only(site.path, site.path, tmp_path / "link")
    check_writable(locate())


def test_an_installation_from_another_environment_is_refused(
    site: Site, tmp_path: Path, path_only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path_only(site.path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    assert "does not belong" in refusal().message
    check_writable(locate(site.path))


def test_two_package_records_are_refused(site: Site) -> None:
    (site.path / "transformers-0.0.1.dist-info").mkdir()
    assert "several records" in refusal(site.path).message


def test_files_and_a_record_of_different_releases_are_refused(site: Site) -> None:
    site.metadata.rename(site.path / "transformers-0.0.1.dist-info")
    refused = refusal(site.path)
    assert refused.facts["expected"].startswith("0.0.1")


def test_an_installation_without_a_version_is_refused(site: Site) -> None:
    (site.root / "__init__.py").write_text("")
    assert "version" in refusal(site.path).message


def test_an_installation_without_a_package_record_is_accepted(site: Site) -> None:
    shutil.rmtree(site.metadata)
    result = locate(site.path)
    assert result.metadata is None
    assert result.recorded_sha256(site.model("llama")) is None
    check_writable(result)
