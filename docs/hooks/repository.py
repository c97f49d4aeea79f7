"""Pages of the site that lie outside of `docs/`, and links that work on the site as they do in a checkout.

The README is the site's first page; what pages say of `examples/`, `benchmarks/` and the changelog leads to them. A
page is written with links by path, as any viewer of the repository follows them; here they become the site's.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]

# Pages by their path in the repository.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples/index.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "benchmarks/gpu-checks.md": "benchmarks/gpu-checks.md",
    "benchmarks/log.md": "benchmarks/log.md",
    "tests/fakecuda/README.md": "fakecuda.md",
}

# Files that pages link to and that are shown as they are.
SHOWN_AS_THEY_ARE = ("examples/**/*.py", "examples/**/*.sbatch", "examples/**/*.yaml", "search_spaces/*.yaml")

_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files from outside of `docs/`."""
    for path, uri in places().items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links by path into links of the site."""
    return relinked(markdown, page.file.src_uri)


def places() -> dict[str, str]:
    """Return where each file from outside of `docs/` stands on the site, by its path in the repository."""
    found = (path.relative_to(ROOT).as_posix() for pattern in SHOWN_AS_THEY_ARE for path in ROOT.glob(pattern))
    return {**PAGES, **{path: path for path in found}}


def relinked(markdown: str, uri: str) -> str:
    """Return the text of the page at `uri`; code is left alone."""
    known = places()
    own = next((path for path, place in known.items() if place == uri), f"docs/{uri}")

    def target(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(own), link[1]))
        place = known.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(place, posixpath.dirname(uri) or ".")

    parts = _FENCE.split(markdown)
    return "".join(part if part.lstrip().startswith("```") else _LINK.sub(target, part) for part in parts)
