"""Fetch the wheels of transformers' releases with pip once, and keep them for all scripts that read them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.version import Version

from hf_rocm.errors import OverlayError
from hf_rocm.overlay.catalog import Catalog, release_span
from lib.environments import ROOT

WHEELS = ROOT / ".cache" / "wheels"
# The approximate size of one wheel.
MEGABYTES = 11

# Release → wheel, from the oldest to the newest.
Wheels = Mapping[str, Path]


def download(catalog: Catalog, folder: Path = WHEELS, *, new_releases: bool = False) -> Wheels:
    """Fetch every final release that an overlay covers into a cache folder. Returns the wheels by release.

    Releases that are newer than all recorded ones are fetched only with `new_releases`, because nobody has reviewed or
    tested them.
    """
    releases = [release for release in _published() if _covered(catalog, release)]
    if not new_releases:
        releases = _recorded(catalog, releases)
    fetch(releases, folder)
    return {release: wheel for release, wheel in wheels_in(folder).items() if release in releases}


def fetch(releases: Iterable[str], folder: Path = WHEELS) -> None:
    """Fetch the wheels that are missing from the folder. Raises `OverlayError` if pip fails."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [release for release in releases if not wheel_of(release, folder).is_file()]
    if missing:
        size = f"{len(missing)} wheel{'s' * (len(missing) > 1)}, about {len(missing) * MEGABYTES} MB"
        print(f"fetching {size}, into {folder}, for this and later runs", file=sys.stderr)
    live = sys.stderr.isatty()
    for number, release in enumerate(missing, 1):
        if live or number % 10 == 0:
            text = f"{number}/{len(missing)} transformers {release}"
            print(f"\r{text} " if live else text, end="" if live else "\n", file=sys.stderr, flush=True)
        _pip("download", "--quiet", "--no-deps", "--dest", str(folder), f"transformers=={release}")
    if missing and live:
        print(file=sys.stderr)


def wheel_of(release: str, folder: Path = WHEELS) -> Path:
    return folder / f"transformers-{release}-py3-none-any.whl"


def wheels_in(folder: Path) -> Wheels:
    """The transformers wheels of final releases in a folder."""
    results = {}
    for path in folder.glob("transformers-*-py3-none-any.whl"):
        version = Version(path.name.split("-")[1])
        if not version.is_prerelease:
            results[version] = path
    return {str(version): results[version] for version in sorted(results)}


def _published() -> list[str]:
    listing = re.search(r"^Available versions: (.+)$", _pip("index", "versions", "transformers"), re.MULTILINE)
    if listing is None:
        raise OverlayError(
            "pip does not list the releases of transformers", hint="check the network, or pass local wheels (--help)"
        )
    return [release.strip() for release in listing[1].split(",")]


def _recorded(catalog: Catalog, releases: list[str]) -> list[str]:
    """Return the releases up to the newest one that has a record. The newer ones are printed and omitted."""
    known = {release for model in catalog.models() for release in catalog.releases(model)}
    newest = max(map(Version, known), default=None)
    newer = [release for release in releases if newest is not None and Version(release) > newest]
    if newer:
        print(
            f"not read: transformers {release_span(newer)}, newer than the newest recorded release, {newest} "
            "(scripts/refresh-digests --new-releases also reads newer releases)",
            file=sys.stderr,
        )
    return [release for release in releases if release not in newer]


def _pip(*arguments: str) -> str:
    result = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise OverlayError(
            f"pip {arguments[0]} failed", facts={"command": " ".join(arguments), "found": result.stderr.strip()[-500:]}
        )
    return result.stdout


def _covered(catalog: Catalog, release: str) -> bool:
    return any(catalog.serving(model, release) for model in catalog.models())
