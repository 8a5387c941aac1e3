"""The proof tables without nox, and what fails for a kernel that is in neither."""

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


def test_a_kernel_in_neither_table_fails_both(tmp_path):
    (tmp_path / "stray.py").write_text("import triton\n\n@triton.jit\ndef stray_kernel(x):\n    pass\n")
    for table, wanted in (("parity", "interpreter"), ("sm120", "sm_120")):
        plugin = f"-p dormouse_kernels.proof --proof-table {table} --proof-src {tmp_path}"
        done = run(f"{sys.executable} -m pytest {plugin} packages/dormouse-kernels/tests/sm120")
        assert done.returncode == 1, done.stdout
        assert f"stray.stray_kernel has no row for {wanted} in the {table} table" in done.stdout
