"""Reads the README files and these pages: their Python blocks, and the commands that their console blocks show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATTERNS = ("README.md", "packages/*/README.md", "apps/*/README.md", "docs/*.md")
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))


def python_of(page: str) -> str:
    """The page with every line outside its Python blocks blanked, so that line numbers stay the page's own."""
    kept, fence = [], None
    for line in page.splitlines():
        edge = line.startswith("```")
        kept.append(line if fence == "```python" and not edge else "")
        if edge:
            fence = line.strip() if fence is None else None
    return "\n".join(kept)


def commands_of(page: str) -> list[str]:
    """The commands of the page's console blocks, one for each `$ `, comments cut and `a && b` taken apart."""
    blocks = re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [part.strip() for line in lines for part in re.sub(r"\s+#\s.*$", "", line).split(" && ")]
