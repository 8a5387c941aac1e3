"""The public names of a package and their signatures, as lines of text; a file of them is kept with each package.

`python docs/signatures.py check PACKAGE...` fails for a package whose names differ from its file while its version is
the one in the file's first line: a change of what others call is a change of version. `write` writes the file, when a
release is made. Public is what the `__all__` of a package, or of a module directly in it, lists: of a class its members
without an underscore, of a listed module that has no `__all__` what it defines.
"""

from __future__ import annotations

import difflib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
FILE = "signatures.txt"


def lines_of(package: Path) -> list[str]:
    """The public signatures of the package in a folder, sorted; its source is read and not imported."""
    name = package.name.replace("-", "_")
    module = griffe.load(name, search_paths=[package / "src"], allow_inspection=False)
    assert isinstance(module, griffe.Module)
    below = [member for member in module.modules.values() if isinstance(member, griffe.Module)]
    listing = [each for each in (module, *below) if each.exports is not None]
    return sorted({line for each in listing for line in _module(each)})


def _module(module: griffe.Module) -> Iterator[str]:
    names = module.exports if module.exports is not None else [n for n, m in module.members.items() if _is_own(n, m)]
    for name in map(str, names):
        if name not in module.members:
            sys.exit(f"{module.path}: __all__ lists '{name}', which the module does not have; mend the list")
        member, path = module.members[name], f"{module.path}.{name}"
        found = member.final_target if isinstance(member, griffe.Alias) else member
        if isinstance(found, griffe.Module) and name in found.members:
            # A package that takes `name` from its module `name` has the object by that name and no longer the module.
            found = found.members[name]
        if isinstance(found, griffe.Module):
            yield from _module(found)
        else:
            yield from _object(found, path)


def _is_own(name: str, member: griffe.Object | griffe.Alias) -> bool:
    return not name.startswith("_") and not isinstance(member, griffe.Alias)


def _object(found: griffe.Object | griffe.Alias, path: str) -> Iterator[str]:
    """One line, and of a class those of its members."""
    if isinstance(found, griffe.Class):
        yield f"class {path}({', '.join(map(str, found.bases))})"
        for name, member in found.members.items():
            if name == "__init__" or _is_own(name, member):
                yield from _object(member, f"{path}.{name}")
    elif isinstance(found, griffe.Function):
        yield f"def {found.signature(name=path)}"
    elif isinstance(found, griffe.Attribute):
        annotation = f": {found.annotation}" if found.annotation is not None else ""
        # What an attribute of an instance is set to is the inside of a constructor.
        shown = found.value is not None and (annotation or "module-attribute" in found.labels)
        yield f"{path}{annotation}{f' = {found.value}' if shown else ''}"


def version_of(package: Path) -> str:
    """The version that the package's `pyproject.toml` holds."""
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]["version"]


def recorded(package: Path) -> tuple[str, list[str]]:
    """The version and the lines that are kept of the package."""
    head, *lines = (package / FILE).read_text().splitlines()
    return head.rpartition(" ")[2], lines


def check(package: Path) -> tuple[bool, str]:
    """Whether the package may be as it is, and what to say of it."""
    version, lines = recorded(package)
    now = lines_of(package)
    changes = [line for line in difflib.unified_diff(lines, now, lineterm="", n=0) if line[0] in "+-"][2:]
    if not changes:
        return True, f"{package.name} {version_of(package)}: the public names of {version}"
    said = "\n".join([f"{package.name} {version_of(package)}: {len(changes)} changes since {version}", *changes])
    if version_of(package) != version:
        return True, said
    bump = f"uv version --package {package.name} --bump patch"
    return False, f"{said}\nbump the version of {package.name} ({bump}), or leave its public names as they were"


def write(package: Path) -> None:
    """Keep the present names under the present version."""
    (package / FILE).write_text("\n".join([f"{package.name} {version_of(package)}", *lines_of(package)]) + "\n")


def main(action: str, packages: list[Path]) -> int:
    """Do `check` or `write` for each package; the exit code is 1 where one may not be as it is."""
    if action == "write":
        for package in packages:
            write(package)
        return 0
    verdicts = [check(package) for package in packages]
    print("\n".join(said for _, said in verdicts))
    return 0 if all(good for good, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], [ROOT / "packages" / name for name in sys.argv[2:]]))
