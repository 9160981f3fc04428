"""Overlays with real package managers, whose caches and other environments must never change."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_rocm.cli import main
from hf_rocm.overlay.audit import Finding
from hf_rocm.overlay.commands import install, record, status, uninstall
from hf_rocm.overlay.install import LEFTOVER
from tests.overlay.conftest import MODELS, Site, fingerprint, hashes
from tests.overlay.promises.world import NEXT, VERSION, Environment, make_wheel

Make = Callable[..., Environment]
SLOW_PIP = pytest.param("pip", marks=pytest.mark.slow)
WAYS = [
    pytest.param("uv", "hardlink", id="uv-hardlink"),
    pytest.param("uv", "clone", id="uv-clone"),
    pytest.param("uv", "copy", id="uv-copy"),
    pytest.param("pip", "copy", id="pip", marks=pytest.mark.slow),
]


def states(site: Site) -> dict[str, str]:
    return {state.model: state.installed.value for state in status(transformers_path=site.path)[1]}


@pytest.mark.parametrize(("tool", "link_mode"), WAYS)
def test_01_other_environments_and_caches_are_unchanged(environments: Make, tool: str, link_mode: str) -> None:
    one, two = environments("one", tool, link_mode), environments("two", tool, link_mode)
    if link_mode == "hardlink":
        assert one.site.model("llama").stat().st_nlink > 2, "the cache and both environments don't share the file"
    elsewhere = {folder: hashes(folder) for folder in (two.path, one.cache, one.wheels) if folder.exists()}
    before = hashes(one.path)
    for command in ("install-overlays", "uninstall-overlays"):
        result = one.hf_rocm(command)
        assert result.returncode == 0, result.stderr
        after = hashes(one.path)
        changed = {path for path in before if after.get(path) != before[path]}
        listed = {str(one.site.model(model).relative_to(one.path)) for model in MODELS}
        assert changed == (listed if command == "install-overlays" else set())
        assert after.keys() - before.keys() <= {".lock"}, "files other than uv's lock were added"
        assert {folder: hashes(folder) for folder in elsewhere} == elsewhere


def test_01_the_symlinks_of_uv_are_refused_and_the_fix_works(environments: Make) -> None:
    environment = environments("one", "uv", "symlink")
    assert environment.site.model("llama").is_symlink()
    paths = (environment.path, environment.cache)
    before = [hashes(path) for path in paths]
    refused = environment.hf_rocm("install-overlays")
    assert refused.returncode == 1
    assert "UV_LINK_MODE=copy" in refused.stderr and "symbolic link" in refused.stderr
    assert [hashes(path) for path in paths] == before
    environment.install(VERSION, "--reinstall", link_mode="copy")
    assert environment.hf_rocm("install-overlays").returncode == 0
    assert hashes(environment.cache).items() >= before[1].items()


def test_01_files_shared_through_hard_links_are_unchanged(farm: Callable[[str], Site]) -> None:
    one, two = farm("one"), farm("two")
    before = hashes(two.path)
    install(transformers_path=one.path)
    assert hashes(two.path) == before
    uninstall(transformers_path=one.path)
    assert hashes(one.path) == hashes(two.path) == before


@pytest.mark.parametrize("tool", ["uv", SLOW_PIP])
def test_08_a_reinstalled_transformers_is_reported_as_not_installed(environments: Make, tool: str) -> None:
    environment = environments("one", tool)
    install(transformers_path=environment.site.path)
    assert set(states(environment.site).values()) == {"yes"}
    environment.uninstall()
    environment.install()
    assert set(states(environment.site).values()) == {"no"}
    checked = environment.hf_rocm("status", "--json")
    assert {file["installed"] for file in json.loads(checked.stdout)["files"]} == {"no"}


@pytest.mark.parametrize(("tool", "link_mode"), WAYS)
def test_13_after_an_upgrade_reinstall_or_downgrade_nothing_is_installed(
    environments: Make, tool: str, link_mode: str
) -> None:
    environment = environments("one", tool, link_mode)
    site, stock = environment.site, hashes(environment.site.root)
    again = "--reinstall" if tool == "uv" else "--force-reinstall"
    for version in (NEXT, VERSION, VERSION):
        install(transformers_path=site.path)
        assert set(states(site).values()) == {"yes"}
        environment.install(version, again)
        assert site.installation.version == version
        assert set(states(site).values()) == {"no"}, "the file that the package manager installed is not stock"
        before = fingerprint(site.root)
        plan, _ = uninstall(transformers_path=site.path)
        assert not plan.writes and fingerprint(site.root) == before, "the stock file of another release was written"
        assert record(transformers_path=site.path).entries == ()
    assert hashes(site.root) == stock


@pytest.mark.parametrize("tool", ["uv", SLOW_PIP])
def test_14_uninstalling_transformers_leaves_no_files(environments: Make, tool: str) -> None:
    environment = environments("one", tool)
    site = environment.site
    assert environment.hf_rocm("install-overlays").returncode == 0
    environment.uninstall()
    assert not [path for path in site.path.rglob("*") if path.is_file() and "transformers" in str(path)]
    assert not site.root.exists() or not any(path.is_file() for path in site.root.rglob("*"))


def test_08_status_record_finds_overwritten_files_and_names_the_fix(environments: Make) -> None:
    one, two = environments("one", "uv", "hardlink"), environments("two", "uv", "hardlink")
    assert one.hf_rocm("status", "--record").returncode == 0
    install(["bert"], transformers_path=one.site.path)
    # Write in place, as `cp` does.
    with one.site.model("llama").open("ab") as file:
        file.write(b"# patched\n")
    (one.site.root / "models" / "llama" / "check.py").touch()
    one.site.model("gemma").unlink()
    table = record(transformers_path=one.site.path)
    by_name = {entry.path.name: (entry.finding, entry.shared) for entry in table.entries}
    assert by_name == {
        "modeling_bert.py": (Finding.OVERLAY, False),
        "modeling_llama.py": (Finding.CHANGED, True),
        "modeling_gemma.py": (Finding.MISSING, False),
        "check.py": (Finding.ADDED, False),
    }
    # The second environment shares the changed file.
    for environment in (one, two):
        shown = environment.hf_rocm("status", "--record", "--json")
        assert shown.returncode == 1
        warning = json.loads(shown.stdout)["warning"]
        assert "uv cache clean transformers" in warning["hint"] and "in every environment" in warning["hint"]
        assert str(environment.site.model("llama")) in warning["facts"]["file"]
    shutil.rmtree(one.cache)
    for environment in (one, two):
        environment.install(VERSION, "--reinstall")
    assert two.hf_rocm("status", "--record").returncode == 0
    assert record(transformers_path=one.site.path).foreign == (table.foreign[-1],), (
        "a file that belongs to no package was removed"
    )


def test_24_a_model_that_this_release_lacks_is_an_error(environments: Make, capsys: pytest.CaptureFixture[str]) -> None:
    environment = environments("one", "uv")
    before = fingerprint(environment.site.root)
    assert environment.hf_rocm("install-overlays", "llama", "mistrall").returncode == 1
    for names in (["llama", "mistrall"], ["../llama"], ["/etc/passwd"], ["lla\nma"], ["LLAMA"]):
        for command in ("install-overlays", "uninstall-overlays", "status"):
            assert main([command, "--transformers-path", str(environment.site.path), "--", *names]) == 1
            refused = capsys.readouterr().err
            assert "no overlay for" in refused and " models, such as " in refused
    assert fingerprint(environment.site.root) == before


def test_02_without_hf_rocm_the_block_explains_how_to_restore_the_file(farm: Callable[[str], Site]) -> None:
    site = farm("one")
    before = hashes(site.path)
    install(transformers_path=site.path)
    for model in MODELS:
        text = site.model(model).read_text()
        assert "delete everything from the first marker to the last" in " ".join(text.replace("#", " ").split())
        first, last = "/^# >>> hf-rocm overlay >>>$/", "/^# <<< hf-rocm overlay <<<$/"
        subprocess.run(["sed", "-i", f"{first},{last}d", str(site.model(model))], check=True)
    assert hashes(site.path) == before


def test_15_only_the_running_environment_is_written_to(environments: Make, tmp_path: Path) -> None:
    one, two = environments("one", "uv"), environments("two", "pip")
    shown = one.hf_rocm("install-overlays", "--dry-run")
    assert shown.returncode == 0 and str(one.site.root) in shown.stdout
    before = {variant.path: fingerprint(variant.site.root) for variant in (one, two)}
    # a second transformers on the path is ambiguous, so it is refused
    shadowed = one.hf_rocm("install-overlays", PYTHONPATH=str(two.site.path))
    assert shadowed.returncode == 1 and "more than one transformers" in shadowed.stderr
    assert str(one.site.root) in shadowed.stderr and str(two.site.root) in shadowed.stderr
    # an installation of transformers in another environment is refused, too
    one.uninstall()
    (one.site.path / "borrowed.pth").write_text(str(two.site.path))
    borrowed = one.hf_rocm("install-overlays")
    assert borrowed.returncode == 1 and "does not belong to the active environment" in borrowed.stderr
    assert f"--transformers-path {two.site.root}" in borrowed.stderr
    assert fingerprint(two.site.root) == before[two.path]
    # the user site is not another environment, so a transformers there may be patched
    user = tmp_path / "user" / "lib" / two.site.path.parent.name / "site-packages"
    user.parent.mkdir(parents=True)
    (one.site.path / "borrowed.pth").unlink()
    settings = one.path / "pyvenv.cfg"
    settings.write_text(settings.read_text().replace("system-site-packages = false", "system-site-packages = true"))
    shutil.copytree(two.site.path, user)
    variables = {"PYTHONUSERBASE": str(tmp_path / "user"), "PYTHONNOUSERSITE": ""}
    installed = one.hf_rocm("install-overlays", **variables)
    assert installed.returncode == 0, installed.stderr
    assert str(user / "transformers") in installed.stdout
    named = two.hf_rocm("install-overlays", "--transformers-path", str(two.site.path))
    assert named.returncode == 0


def test_15_an_editable_install_is_refused(environments: Make, tmp_path: Path) -> None:
    environment = environments("one", "uv")
    project = tmp_path / "checkout"
    (project / "src").mkdir(parents=True)
    shutil.copytree(environment.site.root, project / "src" / "transformers")
    environment.uninstall()
    shutil.rmtree(environment.site.root, ignore_errors=True)
    wheel = make_wheel(tmp_path / "editable")
    subprocess.run(["unzip", "-q", str(wheel), "transformers-*", "-d", str(environment.site.path)], check=True)
    (environment.site.path / "editable.pth").write_text(str(project / "src"))
    (environment.site.metadata / "direct_url.json").write_text(
        json.dumps({"url": f"file://{project}", "dir_info": {"editable": True}})
    )
    before = hashes(project)
    refused = environment.hf_rocm("install-overlays")
    assert refused.returncode == 1
    assert "editable or source checkout" in refused.stderr and "pip install transformers without -e" in refused.stderr
    assert hashes(project) == before


PLACES: dict[str, Callable[[Site], Path]] = {
    "package": lambda site: site.root,
    "models": lambda site: site.root / "models",
    "model's folder": lambda site: site.model("llama").parent,
    "compiled files": lambda site: site.model("llama").parent / "__pycache__",
    "file": lambda site: site.model("llama"),
}


@pytest.mark.parametrize("linked", PLACES)
def test_16_symbolic_links_are_never_followed(farm: Callable[[str], Site], tmp_path: Path, linked: str) -> None:
    site, other = farm("one"), farm("two")
    for variant in (site, other):
        compiled = PLACES["compiled files"](variant)
        compiled.mkdir()
        (compiled / "modeling_llama.cpython-311.pyc").write_bytes(b"compiled")
    (other.model("llama").parent / f".modeling_llama.py.0{LEFTOVER}").write_bytes(b"somebody else's")
    path, target = PLACES[linked](site), PLACES[linked](other)
    path.unlink() if linked == "file" else shutil.rmtree(path)
    path.symlink_to(target)
    before = fingerprint(other.path), hashes(other.path)
    if linked not in ("package", "models"):
        install(["bert"], transformers_path=site.path)
        assert (fingerprint(other.path), hashes(other.path)) == before, "the other folder was changed"
    if linked in ("package", "models"):
        with pytest.raises(Exception, match="symbolic link"):
            install(transformers_path=site.path)
    else:
        plan, _ = install(transformers_path=site.path)
        refused = [error.facts.get("file", error.facts.get("folder", "")) for error in plan.refusals]
        assert refused == [str(path)]
        assert plan.refusals[0].facts["found"] == f"a link to {target}" and plan.refusals[0].hint
        assert states(site).pop("llama") == "no"
    assert (fingerprint(other.path), hashes(other.path)) == before
