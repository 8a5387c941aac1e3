"""Checks an installed package against its source folder: `python -I docs/installed.py NAME FOLDER`.

Run by the `wheel` session in an environment that holds built wheels and nothing of the tree; needs the standard
library only.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
from pathlib import Path


def missing_files(source: Path, installed: Path) -> list[str]:
    """Files of the source tree, Python and data alike, that did not come along in the wheel."""
    files = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    return sorted(str(path) for path in files if path.suffix != ".pyc" and not (installed / path).is_file())


def check(package: str, folder: Path) -> str:
    """What was found, in one line; exits with a sentence when the package is not whole."""
    name = package.replace("-", "_")
    module = importlib.import_module(name)
    place = Path(module.__file__ or "").parent
    site = Path(sysconfig.get_path("purelib"))
    if place != site / name:
        sys.exit(f"{name} was imported from {place}, not from {site}: the environment is not clean")
    if not (place / "py.typed").is_file():
        sys.exit(f"{name} has no py.typed in its wheel: type checkers will ignore its annotations")
    if missing := missing_files(folder / "src" / name, place):
        sys.exit(f"{name}'s wheel lacks {', '.join(missing)}; list them under tool.hatch.build")
    return f"{package}: whole, py.typed included, imported from {place}"


if __name__ == "__main__":
    print(check(sys.argv[1], Path(sys.argv[2])))
