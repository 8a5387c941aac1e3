"""The public names of a package are kept in a file: a change of them without a change of version is found."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import signatures
from pages import PAGES, ROOT, python_of

PACKAGES = ("dormouse-kernels", "dormouse-quant", "dormouse-model", "dormouse-train")
QUANT = ROOT / "packages" / "dormouse-quant"
each_package = pytest.mark.parametrize("package", PACKAGES)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of a package that is as its last release, to be changed."""
    copy = tmp_path / QUANT.name
    shutil.copytree(QUANT, copy)
    signatures.write(copy)
    good, said = signatures.check(copy)
    assert good
    assert said.endswith(f": the public names of {signatures.version_of(copy)}")
    return copy


def edit(package: Path, old: str, new: str, file: str = "src/dormouse_quant/ladder.py") -> None:
    text = (package / file).read_text()
    assert old in text
    (package / file).write_text(text.replace(old, new, 1))


@each_package
def test_a_package_has_the_names_of_its_release_or_another_version(package: str):
    good, said = signatures.check(ROOT / "packages" / package)
    assert good, said


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("rung(name: str)", "rung(name: str, strict: bool = True)", "+def dormouse_quant.rung(name: str, strict"),
        ("rung(name: str) -> Rung", "rung(name: str) -> object", "+def dormouse_quant.rung(name: str) -> object"),
        ("def quantize(self, ", "def quantise(self, ", "-def dormouse_quant.Rung.quantize("),
    ],
    ids=["an argument", "what is returned", "a method's name"],
)
def test_a_planted_change_fails_until_the_version_is_another(copied: Path, old: str, new: str, line: str):
    edit(copied, old, new)
    good, said = signatures.check(copied)
    assert not good
    assert line in said
    assert said.splitlines()[-1].startswith("bump the version of dormouse-quant")
    edit(copied, f'version = "{signatures.version_of(copied)}"', 'version = "7.0.0"', "pyproject.toml")
    good, said = signatures.check(copied)
    assert good
    assert line in said


def test_a_name_that_is_no_longer_listed_is_a_change(copied: Path):
    edit(copied, '"LADDER", ', "", "src/dormouse_quant/__init__.py")
    good, said = signatures.check(copied)
    assert not good
    assert "\n-dormouse_quant.LADDER" in said


def test_a_change_behind_the_public_names_is_none(copied: Path):
    before = signatures.lines_of(copied)
    (copied / "src" / "dormouse_quant" / "ladder.py").open("a").write("\n\ndef _inner(x: int) -> int:\n    return x\n")
    edit(copied, '"""', '"""Said otherwise. ')
    assert signatures.lines_of(copied) == before


def test_the_command_fails_for_one_package_that_may_not_be_as_it_is(tmp_path: Path):
    for name in ("packages/dormouse-quant", "packages/dormouse-kernels"):
        shutil.copytree(ROOT / name, tmp_path / name)
        signatures.write(tmp_path / name)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "signatures.py", tmp_path / "docs")
    command = [sys.executable, str(tmp_path / "docs" / "signatures.py"), "check", "dormouse-kernels", "dormouse-quant"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    edit(tmp_path / "packages" / "dormouse-quant", "def rung(name: str)", "def rung(called: str)")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "+def dormouse_quant.rung(called: str)" in done.stdout


def test_a_name_from_a_module_of_its_name_is_the_object():
    lines = signatures.lines_of(ROOT / "packages" / "dormouse-kernels")
    assert any(
        line.startswith("def dormouse_kernels.route(top_k_index: torch.Tensor, num_experts: int") for line in lines
    )
    assert not [line for line in lines if "dormouse_kernels.route." in line or ".moe." in line.partition("(")[0]]


def test_every_name_that_a_page_shows_is_public():
    public = {
        re.sub(r"^(def|class) ", "", line).partition("(")[0].partition(":")[0].partition(" =")[0]
        for package in PACKAGES
        for line in signatures.lines_of(ROOT / "packages" / package)
    }
    shown = set()
    for page in PAGES:
        text = page.read_text()
        shown |= set(re.findall(r"^::: (\S+)", text, re.MULTILINE))
        for module, names in re.findall(
            r"^from (dormouse_(?!bench)[\w.]+) import (.+)$", python_of(text), re.MULTILINE
        ):
            shown |= {f"{module}.{name.strip()}" for name in names.split(",")}
    modules = {path.rpartition(".")[0] for path in public}
    assert len(shown) > 20
    assert sorted(shown - public - modules) == []
