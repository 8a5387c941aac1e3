"""How kernels are proven: rows against an oracle, rows off the compiler, and a pytest plugin that prints both.

`python -m pytest -p dormouse_kernels.proof TESTS` prints the tables; `--proof-src SRC` fails for a `@triton.jit`
under SRC without its rows, `--gpu-required` for a GPU row that did not run, `--proof-archs 80,86` compiles for other
cards than 120 and 90. Needs pytest.
"""

from dormouse_kernels.proof.canary import surrounded
from dormouse_kernels.proof.listing import jit_functions, missing
from dormouse_kernels.proof.plugin import (
    Proof,
    archs,
    proof,
    pytest_addoption,
    pytest_configure,
    pytest_sessionfinish,
    pytest_terminal_summary,
)
from dormouse_kernels.proof.rows import CompilerRow, ParityRow, relative_errors

__all__ = [
    "CompilerRow",
    "ParityRow",
    "Proof",
    "archs",
    "jit_functions",
    "missing",
    "proof",
    "pytest_addoption",
    "pytest_configure",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "relative_errors",
    "surrounded",
]
