"""Writes the repository's address into the files that a package registry shows: links of README.md, [project.urls].

    python -m tools.release_metadata https://example.org/owner/name v0.2.0

The workflow of releases runs this first. The source itself names no address, so the release of a fork names its own.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = (".png", ".svg")
# [text](target), src="target" and the like; not an address, not a place on the page itself.
RELATIVE_LINK = re.compile(r'(\]\(|(?:src|srcset|href)=")(?!https?:|#)([^)\s"]+)')


def with_absolute_links(page: str, repository: str, reference: str) -> str:
    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[2].endswith(PICTURES) else "blob"
        return f"{link[1]}{repository}/{kind}/{reference}/{link[2]}"

    return RELATIVE_LINK.sub(absolute, page)


def with_urls(pyproject: str, repository: str, reference: str) -> str:
    urls = {
        "Repository": repository,
        "Documentation": f"{repository}/blob/{reference}/docs/index.md",
        "Changelog": f"{repository}/blob/{reference}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return pyproject.replace("\n[project.scripts]\n", f"\n[project.urls]\n{table}\n[project.scripts]\n", 1)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m tools.release_metadata REPOSITORY TAG")
    for name, change in (("README.md", with_absolute_links), ("pyproject.toml", with_urls)):
        path = ROOT / name
        path.write_text(change(path.read_text(encoding="utf-8"), *sys.argv[1:]), encoding="utf-8")


if __name__ == "__main__":
    main()
