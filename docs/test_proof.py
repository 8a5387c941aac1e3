"""The proof tables without nox, as the pages show them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
import torch
from pages import PAGES, ROOT, commands_of

SHOWN = {line for path in PAGES for line in commands_of(path.read_text()) if line.startswith("python -m pytest -p")}


@pytest.mark.parametrize("command", sorted(SHOWN))
def test_a_plain_command_prints_its_tables_and_fails_only_for_a_gpu_row_that_had_to_run(command):
    python = [sys.executable, *shlex.split(command)[1:]]
    variables = os.environ | {"PYTHONPATH": "packages/dormouse-kernels/src"}
    done = subprocess.run(python, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert "verdict" in done.stdout, done.stderr
    if torch.cuda.is_available():
        assert done.returncode == 0, done.stdout
        assert "not run" not in done.stdout
    elif "--gpu-required" in command:
        assert done.returncode == 1, done.stdout
        assert "on level gpu was not run: there is no CUDA device" in done.stdout
    else:
        assert done.returncode == 0, done.stdout
        assert "not run" in done.stdout


def test_a_page_shows_the_command_that_insists_on_a_gpu():
    assert any("--gpu-required" in command for command in SHOWN)
