"""What someone gets who has only a clone: the whole workspace, or the kernels alone in a project of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from pages import ROOT, commands_of, python_of

README = (ROOT / "README.md").read_text()
ROOT_UV = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
# The other project has this workspace's pins, so that a test downloads no second torch.
PINS = f"""
[tool.uv]
constraint-dependencies = {json.dumps(ROOT_UV["constraint-dependencies"])}
environments = {json.dumps(ROOT_UV["environments"])}
"""


def shell(lines: list[str], folder: Path, **variables: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
    }
    command = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=folder, env=environment | variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{lines}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A repository of the tree as it stands here, what is not committed yet included, and nothing that git ignores."""
    folder = tmp_path_factory.mktemp("fresh") / "dormouse"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    identity = "-c user.name=reader -c user.email=reader@example.org"
    shell(["git init -q", "git add -A", f"git {identity} commit -qm clone"], folder)
    return folder


@pytest.fixture
def elsewhere(clone) -> Path:
    folder = clone.parent / "elsewhere"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def shown(*starts: str) -> list[str]:
    """The README's commands that begin so, in the README's order."""
    found = [line for line in commands_of(README) if line.startswith(starts)]
    assert len(found) == len(starts)
    return found


def the_readme_runs_from_site_packages(project: Path) -> None:
    where = "import dormouse_kernels\nprint(dormouse_kernels.__file__)\n"
    (project / "example.py").write_text(f"{python_of(README)}\n{where}")
    assert f"{project}/.venv/lib/" in shell(["uv run --no-sync python example.py"], project)


def test_a_clone_is_made_as_shown(clone, tmp_path):
    where = shell(
        [*shown("git clone", "cd dormouse"), "pwd", "git status --short"], tmp_path, REPOSITORY=f"file://{clone}"
    )
    assert where.split() == [str(tmp_path / "dormouse")]


def test_the_kernels_alone_from_a_wheel(clone, elsewhere):
    shell(shown("uv build", "mkdir ../elsewhere", "cd ../elsewhere", "uv init --bare"), clone)
    with (elsewhere / "pyproject.toml").open("a") as file:
        file.write(PINS)
    shell(shown("uv add ../dormouse/dist/"), elsewhere)
    the_readme_runs_from_site_packages(elsewhere)


def test_the_kernels_alone_from_git(clone, elsewhere):
    elsewhere.mkdir()
    shell(["uv init --bare"], elsewhere)
    with (elsewhere / "pyproject.toml").open("a") as file:
        file.write(PINS)
    shell(shown('uv add "dormouse-kernels @ git+'), elsewhere, REPOSITORY=f"file://{clone}")
    the_readme_runs_from_site_packages(elsewhere)


def test_a_fresh_clone_syncs_whole(clone):
    shell(["uv sync --quiet --all-packages --all-groups"], clone)
    collected = shell(["uv run --no-sync pytest packages/dormouse-kernels --collect-only -q"], clone)
    assert re.search(r"^\d+ tests collected", collected, re.MULTILINE)


def test_a_fresh_clone_trains_with_one_command(clone):
    (command,) = shown("uv run --package dormouse-train train")
    short = "--steps 2 --run run --set eval.window_bytes=512 --set eval.final_window_bytes=512"
    shell([f"{command} {short} --set eval.sample_bytes=4"], clone)
    assert json.loads((clone / "run" / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
    assert [path.name for path in (clone / "run" / "checkpoints").iterdir()] == ["step-2"]
