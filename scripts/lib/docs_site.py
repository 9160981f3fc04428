"""Write or check the generated pages, and build the site.

scripts/build-docs runs this module in an environment with mkdocs.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(check: bool) -> int:
    sys.path.insert(1, str(ROOT / "scripts"))
    from lib.reference import pages

    stale = [file for file, text in pages().items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        if check:
            print(f"{file.relative_to(ROOT)} differs from the sources: run scripts/build-docs", file=sys.stderr)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(pages()[file], encoding="utf-8")
            print(f"written  {file.relative_to(ROOT)}")
    return 1 if check and stale else build(ROOT / ".envs" / "site")


def build(target: Path) -> int:
    """Build the site. A broken link, or a page that is missing from the navigation, is an error."""
    import mkdocs.commands.build
    import mkdocs.config
    from mkdocs.exceptions import Abort

    config = mkdocs.config.load_config(str(ROOT / "scripts" / "mkdocs.yml"), site_dir=str(target), strict=True)
    try:
        mkdocs.commands.build.build(config)
    except Abort as abort:
        print(f"error: the site was not built: {abort}", file=sys.stderr)
        return 1
    print(f"built    {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
