"""The pytest side: a fixture that collects rows from tests, and the tables printed at the end of the session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dormouse_kernels.aot import Compiled, shared_limit
from dormouse_kernels.launch import interpreting
from dormouse_kernels.proof.listing import Table, jit_functions, missing
from dormouse_kernels.proof.rows import COMPILER_COLUMNS, PARITY_COLUMNS, CompilerRow, Level, ParityRow, table


@dataclass
class Collected:
    """The rows of a session and what is wrong with them as a whole."""

    parity: list[ParityRow] = field(default_factory=list)
    sm120: list[CompilerRow] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


_COLLECTED: pytest.StashKey[Collected] = pytest.StashKey()


class Proof:
    """The fixture `proof`: a test gives it what it measured; it keeps the row and holds it to its bound."""

    def __init__(self, collected: Collected, *, gpu_required: bool) -> None:
        self._collected = collected
        self._gpu_required = gpu_required

    def parity(
        self,
        op: str,
        shape: str,
        dtype: torch.dtype,
        level: Level,
        *,
        bound: float,
        measure: Callable[[torch.device], Mapping[str, float]],
        kernels: tuple[Any, ...] = (),
    ) -> None:
        """Runs `measure(device)` for {tensor: relative error} and fails for the tensors over `bound`.

        Where this machine cannot run the level (no GPU, or kernels that are not interpreted) the row reads `not run`
        and the test is skipped, or fails for a GPU row under `--gpu-required`. `kernels`: the `@triton.jit`
        functions that ran.
        """
        device = _device(level)
        errors = None if device is None else dict(measure(device))
        name = str(dtype).removeprefix("torch.")
        row = ParityRow(op, shape, name, level, bound, errors, tuple(_kernel_name(kernel) for kernel in kernels))
        self._collected.parity.append(row)
        if errors is None:
            reason = f"{op} on level {level} was not run: {_REASONS[level]}"
            if level == "gpu" and self._gpu_required:
                pytest.fail(reason)
            pytest.skip(reason)
        over = ", ".join(f"{tensor} {error:.3e}" for tensor, error in row.over.items())
        assert not row.over, f"{op} {shape} {name} on level {level}: over the bound {bound:g}: {over}"

    def compiled(
        self, compiled: Compiled, tile: str, *, kernels: tuple[Any, ...], spill_limit: int = 0, narrow_limit: int = 0
    ) -> None:
        """Keeps the row of a compiled kernel and fails if it is over its card's shared memory or over a limit."""
        names = tuple(_kernel_name(kernel) for kernel in kernels)
        row = CompilerRow(compiled, tile, shared_limit(compiled.arch), spill_limit, narrow_limit, names)
        self._collected.sm120.append(row)
        assert not row.over, f"{compiled.kernel} {tile} on sm_{compiled.arch}: {row.over}"


_REASONS: Mapping[str, str] = {
    "interpreter": "TRITON_INTERPRET was not set before the kernels were imported",
    "gpu": "there is no CUDA device, or TRITON_INTERPRET is set",
}


def _device(level: Level) -> torch.device | None:
    if level == "reference" or (level == "interpreter" and interpreting()):
        return torch.device("cpu")
    if level == "gpu" and torch.cuda.is_available() and not interpreting():
        return torch.device("cuda")
    return None


def _kernel_name(kernel: Any) -> str:
    return kernel if isinstance(kernel, str) else f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Proof:
    """Collects rows for the tables; without the plugin (`-p dormouse_kernels.proof`) it only holds them to bounds."""
    collected = request.config.stash.setdefault(_COLLECTED, Collected())
    return Proof(collected, gpu_required=request.config.getoption("--gpu-required", False))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the tables."""
    group = parser.getgroup("proof", "tables that prove kernels")
    group.addoption("--gpu-required", action="store_true", help="a GPU row that did not run fails")
    group.addoption(
        "--proof-src", action="append", default=[], metavar="SRC",
        help="a source tree: every @triton.jit under it must have its rows (may be given again)",
    )  # fmt: skip
    group.addoption(
        "--proof-table", action="append", default=[], choices=["parity", "sm120"],
        help="a table that this session is to fill (default: both)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Starts with no rows."""
    config.stash.setdefault(_COLLECTED, Collected())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the session for kernels without rows."""
    config = session.config
    collected = config.stash[_COLLECTED]
    tables: list[Table] = config.getoption("--proof-table") or ["parity", "sm120"]
    functions = [name for src in config.getoption("--proof-src") for name in jit_functions(Path(src))]
    for name in tables:
        rows = collected.parity if name == "parity" else collected.sm120
        collected.complaints += missing(functions, name, rows)
    if (
        config.getoption("--gpu-required")
        and "parity" in tables
        and not any(r.level == "gpu" for r in collected.parity)
    ):
        collected.complaints.append("--gpu-required was given but no test made a GPU row; run the parity tests")
    if collected.complaints:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the tables, then what is wrong with them."""
    collected = config.stash[_COLLECTED]
    for name, columns, rows in (
        ("parity", PARITY_COLUMNS, [row.cells() for row in collected.parity]),
        ("sm120", COMPILER_COLUMNS, [row.cells() for row in collected.sm120]),
    ):
        if rows:
            terminalreporter.section(name)
            for line in table(columns, cast("list[tuple[str, ...]]", rows)):
                terminalreporter.write_line(line)
    for complaint in collected.complaints:
        terminalreporter.write_line(f"FAILED: {complaint}", red=True)
