"""Every command that a page shows is covered: parsed by its own command line, or run by a test that is named here."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import typer
from pages import PAGES, ROOT, commands_of

SHOWN = sorted({(str(path.relative_to(ROOT)), line) for path in PAGES for line in commands_of(path.read_text())})
# What runs the commands that belong to no console script of ours: a pattern of the command, and the test.
PLAIN = "test_a_plain_command_prints_its_tables_and_fails_only_for_a_gpu_row_that_had_to_run"
TUNE = "packages/dormouse-kernels/tests/tune/test_tune.py"
COMPILE_ONLY = "test_compile_only_prints_a_table_and_writes_what_a_call_takes"
RUN_BY = {
    r'git clone "\$REPOSITORY" dormouse': "docs/test_fresh.py::test_a_clone_is_made_as_shown",
    r"cd dormouse": "docs/test_fresh.py::test_a_clone_is_made_as_shown",
    r"python -m dormouse_kernels.tune latent_glu_experts --compile-only --arch 120 .*": f"{TUNE}::{COMPILE_ONLY}",
    r"uv build --package dormouse-kernels": "docs/test_fresh.py::test_the_kernels_alone_from_a_wheel",
    r"mkdir \.\./elsewhere": "docs/test_fresh.py::test_the_kernels_alone_from_a_wheel",
    r"cd \.\./elsewhere": "docs/test_fresh.py::test_the_kernels_alone_from_a_wheel",
    r"uv init --bare": "docs/test_fresh.py::test_the_kernels_alone_from_a_wheel",
    r"uv add \.\./dormouse/dist/\S+": "docs/test_fresh.py::test_the_kernels_alone_from_a_wheel",
    r'uv add "dormouse-kernels @ git\+\S+"': "docs/test_fresh.py::test_the_kernels_alone_from_git",
    r"export PYTHONPATH=packages/dormouse-kernels/src": f"docs/test_proof.py::{PLAIN}",
    r"python -m pytest -p dormouse_kernels.proof .*": f"docs/test_proof.py::{PLAIN}",
    r"uv sync --all-packages --all-groups": "docs/test_fresh.py::test_a_fresh_clone_syncs_whole",
    r"uv run --no-sync pytest packages/dormouse-kernels": "docs/test_fresh.py::test_a_fresh_clone_syncs_whole",
}


def parser_of(script: Callable[[], object]) -> Any:
    """The command line of a console script: what it would run is caught before it runs."""
    caught: list[typer.Typer] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with patch.object(typer.Typer, "__call__", lambda app, *_, **__: caught.append(app)), suppress(SystemExit):
        script()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    (app,) = caught
    return typer.main.get_command(app)


@functools.cache
def scripts() -> dict[str, Any]:
    """The console scripts of all packages, as the parsers of their arguments."""
    found = {}
    for path in (*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")):
        for name, target in tomllib.loads(path.read_text())["project"].get("scripts", {}).items():
            module, _, function = target.partition(":")
            found[name] = parser_of(getattr(importlib.import_module(module), function))
    return found


def parse(command: Any, name: str, words: list[str], parent: Any = None) -> None:
    """Parses arguments down to the last subcommand, running none of it; raises for one that is unknown."""
    context = command.make_context(name, list(words), parent=parent)
    if hasattr(command, "resolve_command"):
        below_name, below, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        parse(below, below_name, rest, context)


def without_uv(words: list[str]) -> list[str]:
    """`uv run --project P --package X --group Y --extra Z script ...` as `script ...`."""
    if words[:2] != ["uv", "run"]:
        return words
    rest = words[2:]
    while rest[0] in ("--project", "--package", "--group", "--extra"):
        rest = rest[2:]
    return rest


def sessions_exist(words: list[str]) -> bool:
    """Whether nox knows every session of a `uvx nox` command."""
    own = words[2 : words.index("--")] if "--" in words else words[2:]
    command = [sys.executable, "-m", "nox", "--list", "--json", *(word for word in own if word not in ("-l", "--list"))]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def uncovered(line: str) -> str | None:
    """Why nothing would notice if the command stopped working; None when something would."""
    words = shlex.split(line)
    if words[:2] == ["uvx", "nox"]:
        return None if sessions_exist(words) else "nox knows no such session"
    own = without_uv(words)
    if own[0] in (known := scripts()):
        try:
            parse(known[own[0]], own[0], own[1:])
        except typer.Exit:
            return None  # --help
        except Exception as error:  # whatever the parser raises, the command would not run
            return str(error)
        return None
    tests = [test for pattern, test in RUN_BY.items() if re.fullmatch(pattern, line)]
    return None if tests else "no test of RUN_BY runs it"


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=lambda value: value)
def test_a_shown_command_is_covered(page, line):
    assert uncovered(line) is None


@pytest.mark.parametrize("test", sorted(set(RUN_BY.values())))
def test_a_named_test_exists(test):
    file, _, name = test.partition("::")
    functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in functions


@pytest.mark.parametrize(
    "line",
    ["uvx nox -s test", "bench expert", "bench experts --shap b1", "train --stepp 4", "dormouse evil run", "make"],
)
def test_a_command_that_does_not_work_is_found(line):
    assert uncovered(line) is not None


@pytest.mark.parametrize("pattern", RUN_BY)
def test_no_pattern_is_left_over(pattern):
    assert [line for _, line in SHOWN if re.fullmatch(pattern, line)]


def test_comments_and_outputs_are_no_commands():
    page = "```console\n$ a --b && c   # why\noutput $ d\n```\n\n```python\n$ e\n```\n"
    assert commands_of(page) == ["a --b", "c"]
