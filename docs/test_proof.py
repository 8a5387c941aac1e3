"""The proof tables without nox."""

from __future__ import annotations

import subprocess
import sys

import torch
from pages import ROOT, commands_of

SHOWN = commands_of((ROOT / "docs" / "contributing.md").read_text())


def run(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-ec", command], cwd=ROOT, capture_output=True, text=True)


def test_the_plain_command_fails_where_a_gpu_row_did_not_run():
    (path,) = (line for line in SHOWN if line.startswith("export PYTHONPATH="))
    (command,) = (line for line in SHOWN if line.startswith("python -m pytest -p dormouse_kernels.proof"))
    done = run(f"{path}; {command.replace('python', sys.executable, 1)}")
    assert "verdict" in done.stdout
    if torch.cuda.is_available():
        assert done.returncode == 0, done.stdout
        assert "not run" not in done.stdout
    else:
        assert done.returncode == 1, done.stdout
        assert "on level gpu was not run: there is no CUDA device" in done.stdout
