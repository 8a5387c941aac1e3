"""What the workspace promises about its own shape: names, ranges, pins, one direction of dependence, one command."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import signatures
from packaging.requirements import Requirement
from packaging.version import Version
from pages import ROOT, commands_of

# In the order in which they may depend on one another.
ORDER = ("dormouse-kernels", "dormouse-quant", "dormouse-model", "dormouse-train", "dormouse-bench")
FOLDERS = {name: ROOT / ("apps/bench" if name == "dormouse-bench" else f"packages/{name}") for name in ORDER}
RECORD = {"torch": "2.13.0", "triton": "3.7.1", "fla-core": "0.5.2", "flash-linear-attention": "0.5.2"}

each_package = pytest.mark.parametrize("package", ORDER)


def toml(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def requirements(package: str) -> list[Requirement]:
    return [Requirement(line) for line in toml(FOLDERS[package])["project"]["dependencies"]]


def imported_siblings(package: str) -> set[str]:
    """Distribution names of the siblings that the package's source imports, at any depth of any file."""
    names: set[str] = set()
    for path in (FOLDERS[package] / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module or "")
    tops = {name.split(".")[0].replace("_", "-") for name in names}
    return (tops & set(ORDER)) - {package}


def test_the_top_level_holds_exactly_what_the_readme_maps():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    top = {line.split("/")[0] for line in tracked.splitlines()}
    assert {name for name in top if not name.startswith(".")} == {
        "pyproject.toml", "uv.lock", "noxfile.py", "README.md", "packages", "apps", "docs",
    }  # fmt: skip


def test_the_lock_is_current():
    done = subprocess.run(["uv", "lock", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_stack_of_record_is_pinned_in_the_root_alone():
    pins = dict(line.split("==") for line in toml(ROOT)["tool"]["uv"]["constraint-dependencies"])
    assert pins == RECORD
    locked = {item["name"]: item.get("version") for item in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    assert {name: locked[name] for name in RECORD} == RECORD
    for package, folder in FOLDERS.items():
        # uv reads these in the root only; in a member they would be a promise that nobody keeps
        assert not {"constraint-dependencies", "override-dependencies"} & set(toml(folder)["tool"]["uv"]), package


def test_flash_linear_attention_is_whole_in_the_parity_group_alone():
    groups = toml(ROOT)["dependency-groups"]
    assert [name for name, lines in groups.items() if any("flash-linear-attention" in str(x) for x in lines)] == [
        "parity"
    ]
    for package in ORDER:
        assert "flash-linear-attention" not in (FOLDERS[package] / "pyproject.toml").read_text(), package


@each_package
def test_every_range_has_a_floor_and_a_ceiling(package):
    groups = toml(FOLDERS[package])["dependency-groups"]
    extras = toml(FOLDERS[package])["project"].get("optional-dependencies", {})
    lines = requirements(package) + [Requirement(line) for group in (groups | extras).values() for line in group]
    for line in lines:
        operators = {spec.operator for spec in line.specifier}
        assert operators & {">=", "=="}, f"{package}: {line} has no floor"
        assert operators & {"<", "=="}, f"{package}: {line} has no ceiling"


@each_package
def test_ranges_on_siblings_admit_their_present_versions(package):
    # uv's lock drops the range of a workspace source, so nothing else would notice
    for line in requirements(package):
        if line.name in ORDER:
            version = toml(FOLDERS[line.name])["project"]["version"]
            assert line.specifier.contains(version), f"{package} asks for {line}, the workspace holds {version}"


@each_package
def test_dependencies_run_one_way_and_imports_are_declared(package):
    before = set(ORDER[: ORDER.index(package)])
    declared = {line.name for line in requirements(package)} & set(ORDER)
    assert declared <= before
    assert imported_siblings(package) <= declared


@each_package
def test_torch_floor_is_what_the_floor_session_installs(package):
    floors = {"torch": "2.11", "triton": "3.6"}
    for line in requirements(package):
        if line.name in floors:
            assert f">={floors[line.name]}" in str(line.specifier).split(","), f"{package}: {line}"
    assert all(f'"{name}=={version}.*"' in (ROOT / "noxfile.py").read_text() for name, version in floors.items())


@pytest.mark.parametrize("package", ORDER[:-1])
def test_a_published_package_is_whole(package):
    folder, module = FOLDERS[package], package.replace("-", "_")
    for name in ("README.md", "CHANGELOG.md", "LICENSE", f"src/{module}/py.typed"):
        path = folder / name
        assert path.is_file(), f"{package} has no {name}"
        assert not path.is_symlink(), f"{package}'s {name} is a link, which a wheel would not carry"
    project = toml(folder)["project"]
    assert "version" in project, f"{package} needs a static version: a clone without tags could not compute one"
    assert project["requires-python"] == ">=3.11"
    released = re.search(r"^## (\d\S*)", (folder / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released, f"{package}'s changelog has no released version"
    assert released.group(1) == signatures.recorded(folder)[0]
    if project["version"] != released.group(1):
        assert Version(project["version"]) > Version(released.group(1))
        news = (folder / "CHANGELOG.md").read_text().partition("## Unreleased\n")[2].partition("\n## ")[0]
        assert news.strip(), f"{package} has another version than its last release and no news"


def sessions(*arguments: str) -> set[str]:
    command = [sys.executable, "-m", "nox", "--list", "--json", *arguments]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    return {item["session"] for item in json.loads(listed.stdout)}


def test_the_default_sessions_take_distribution_names_and_leave_out_the_slow_ones():
    by_package = {f"{session}({package})" for session in ("tests", "wheel") for package in ORDER}
    assert sessions() == by_package | {"parity", "sm120", "lint", "docs", "api"}
    assert sessions("--sessions", "floor", "bench", "release") == {"floor", "bench", "release"}


def run_ci(tmp_path: Path, *present: str) -> list[str]:
    """The commands that `.ci/run` gives where these programs are present, each a stand-in that writes itself down."""
    said = tmp_path / "said"
    for name in present:
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/bash\n[ "$1" = -c ] || echo "{name} $*" >> {said}\n')
        program.chmod(0o755)
    for name in ("bash", "dirname", "env"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    variables = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    subprocess.run([str(ROOT / ".ci" / "run")], env=variables, check=True, capture_output=True)
    return said.read_text().splitlines()


def test_ci_runs_the_command_that_the_readme_shows(tmp_path):
    (command,) = run_ci(tmp_path, "uv", "uvx")
    assert command == "uvx nox"
    assert command in commands_of((ROOT / "README.md").read_text())


def test_ci_first_installs_an_accepted_uv_where_it_is_missing(tmp_path):
    required = toml(ROOT)["tool"]["uv"]["required-version"]
    assert run_ci(tmp_path, "python3", "uvx") == [f"python3 -m pip install uv{required}", "uvx nox"]
