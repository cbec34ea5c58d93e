"""Build the documentation as a site, in build/docs: `make docs`. A warning is an error.

The pages are the repository's own, with all that they link to, at the same paths: a link that works there works here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "docs"


def linked(page: Path) -> set[Path]:
    """Return the files of this repository that a page links to or shows."""
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s#]+)", prose)
    found = {(page.parent / target).resolve() for target in targets if not re.match(r"[a-z]+:", target)}
    return {path for path in found if path.is_file() and path.is_relative_to(ROOT)}


def pages() -> set[Path]:
    """Return every file that can be reached from the README, and the README."""
    reached: set[Path] = set()
    new = {ROOT / "README.md"}
    while new:
        reached |= new
        new = {path for page in new if page.suffix == ".md" for path in linked(page)} - reached
    return reached


def main() -> int:
    """Build it; the status is that of mkdocs."""
    with tempfile.TemporaryDirectory() as folder:
        for path in pages():
            copy = Path(folder, "pages", path.relative_to(ROOT))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        shutil.copy(ROOT / "scripts" / "mkdocs.yml", folder)
        words = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(SITE)]
        status = subprocess.run(words, cwd=folder).returncode
    if status == 0:
        print(f"the site begins with {SITE / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
