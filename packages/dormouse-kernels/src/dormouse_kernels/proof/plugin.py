"""The pytest side: a fixture that collects rows from tests, and the tables printed at the end of the session."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dormouse_kernels.aot import SHARED_LIMITS, Compiled, shared_limit
from dormouse_kernels.launch import interpreting
from dormouse_kernels.proof.listing import Table, jit_functions, missing
from dormouse_kernels.proof.rows import COMPILER_COLUMNS, PARITY_COLUMNS, CompilerRow, Level, ParityRow, table


@dataclass
class Collected:
    """The rows of a session and what is wrong with them as a whole."""

    functions: list[str] = field(default_factory=list)
    """The `@triton.jit` functions that must have rows."""
    parity: list[ParityRow] = field(default_factory=list)
    sm120: list[CompilerRow] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    made_by: list[tuple[str, ParityRow]] = field(default_factory=list)
    """The parity rows again, each with the test that made it."""
    interpreted: dict[str, list[ParityRow]] | None = None
    """Rows by test from the process whose kernels are interpreted, once there was need of it."""


ARCHS = (120, 90)
"""The cards that compiler tests build for unless `--proof-archs` names others."""

_COLLECTED: pytest.StashKey[Collected] = pytest.StashKey()


class Proof:
    """The fixture `proof`: a test gives it what it measured; it keeps the row and holds it to its bound."""

    def __init__(self, request: pytest.FixtureRequest, collected: Collected) -> None:
        self._node: pytest.Item = request.node
        self._collected = collected
        self._gpu_required = request.config.getoption("--gpu-required", False)

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

        Without a GPU a GPU row reads `not run` and the test is skipped, or fails under `--gpu-required`. Where kernels
        are compiled, the interpreter's rows come from one process beside this one, which runs the same tests: those
        whose parameter `level` is "interpreter". `kernels`: the `@triton.jit` functions that ran.
        """
        name = str(dtype).removeprefix("torch.")
        row = ParityRow(op, shape, name, level, bound, None, tuple(_kernel_name(kernel) for kernel in kernels))
        device = _device(level)
        if device is not None:
            row = replace(row, errors=dict(measure(device)))
        elif level == "interpreter":
            row = self._interpreted_row(row)
        self._collected.parity.append(row)
        self._collected.made_by.append((self._node.nodeid, row))
        if row.errors is None:
            reason = f"{op} on level gpu was not run: there is no CUDA device, or TRITON_INTERPRET is set"
            if self._gpu_required:
                pytest.fail(reason)
            pytest.skip(reason)
        over = ", ".join(f"{tensor} {error:.3e}" for tensor, error in row.over.items())
        assert not row.over, f"{op} {shape} {name} on level {level}: over the bound {bound:g}: {over}"

    def _interpreted_row(self, row: ParityRow) -> ParityRow:
        if self._collected.interpreted is None:
            self._collected.interpreted = _interpret(self._node.session)
        rows = self._collected.interpreted.get(self._node.nodeid)
        if not rows:
            pytest.fail(f"{row.op}: the process whose kernels are interpreted made no row for this test")
        return rows.pop(0)

    def compiled(
        self, compiled: Compiled, tile: str, *, kernels: tuple[Any, ...], spill_limit: int = 0, narrow_limit: int = 0
    ) -> None:
        """Keeps the row of a compiled kernel and fails if it is over its card's shared memory or over a limit."""
        names = tuple(_kernel_name(kernel) for kernel in kernels)
        row = CompilerRow(compiled, tile, shared_limit(compiled.arch), spill_limit, narrow_limit, names)
        self._collected.sm120.append(row)
        assert not row.over, f"{compiled.kernel} {tile} on sm_{compiled.arch}: {row.over}"


def _device(level: Level) -> torch.device | None:
    if level == "reference" or (level == "interpreter" and interpreting()):
        return torch.device("cpu")
    if level == "gpu" and torch.cuda.is_available() and not interpreting():
        return torch.device("cuda")
    return None


def _interpret(session: pytest.Session) -> dict[str, list[ParityRow]]:
    """Runs the session's tests of the level "interpreter" where kernels are interpreted: their rows by test."""
    tests = [
        item.nodeid
        for item in session.items
        if "interpreter" in getattr(getattr(item, "callspec", None), "params", {}).values()
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        plugin = ["-q", "-p", "dormouse_kernels.proof", "--proof-rows", str(rows)]
        command = [sys.executable, "-m", "pytest", *plugin, *tests]
        subprocess.run(command, cwd=session.config.rootpath, env=environment, capture_output=True, check=False)
        made: list[tuple[str, ParityRow]] = pickle.loads(rows.read_bytes()) if rows.exists() else []
    by_test: dict[str, list[ParityRow]] = {}
    for test, row in made:
        by_test.setdefault(test, []).append(row)
    return by_test


def _kernel_name(kernel: Any) -> str:
    return kernel if isinstance(kernel, str) else f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Proof:
    """Collects rows for the tables; without the plugin (`-p dormouse_kernels.proof`) it only holds them to bounds."""
    collected = request.config.stash.setdefault(_COLLECTED, Collected())
    return Proof(request, collected)


def archs(config: pytest.Config) -> tuple[int, ...]:
    """The cards to compile for, as compute capability × 10: `--proof-archs`, otherwise `ARCHS`."""
    named = config.getoption("--proof-archs", None)
    return ARCHS if named is None else tuple(int(arch) for arch in named.split(","))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the tables."""
    group = parser.getgroup("proof", "tables that prove kernels")
    group.addoption("--gpu-required", action="store_true", help="a GPU row that did not run fails")
    group.addoption(
        "--proof-src", action="append", default=[], metavar="SRC",
        help="a source tree: every @triton.jit under it must have its rows (may be given again)",
    )  # fmt: skip
    group.addoption("--proof-archs", metavar="ARCH,...", help="cards to compile for, as in 80,86 (default: 120,90)")
    group.addoption("--proof-rows", metavar="FILE", help="also pickle the parity rows, for the process beside")
    group.addoption(
        "--proof-table", action="append", default=[], choices=["parity", "sm120"],
        help="a table that this session is to fill (default: both)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Starts with no rows, and with the kernels that must get some."""
    try:
        unknown = [arch for arch in archs(config) if arch not in SHARED_LIMITS]
    except ValueError:
        unknown = [config.getoption("--proof-archs")]
    if unknown:
        known = ", ".join(map(str, SHARED_LIMITS))
        raise pytest.UsageError(f"--proof-archs: {unknown[0]} is no card that is known here; pass some of {known}")
    try:
        functions = [name for src in config.getoption("--proof-src") for name in jit_functions(Path(src))]
    except ValueError as error:
        raise pytest.UsageError(f"--proof-src: {error}") from None
    config.stash[_COLLECTED] = Collected(functions=functions)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the session for kernels without rows."""
    config = session.config
    collected = config.stash[_COLLECTED]
    tables: list[Table] = config.getoption("--proof-table") or ["parity", "sm120"]
    for name in tables:
        rows = collected.parity if name == "parity" else collected.sm120
        collected.complaints += missing(collected.functions, name, rows)
    if (
        config.getoption("--gpu-required")
        and "parity" in tables
        and not any(r.level == "gpu" for r in collected.parity)
    ):
        collected.complaints.append("--gpu-required was given but no test made a GPU row; run the parity tests")
    if config.getoption("--proof-rows"):
        Path(config.getoption("--proof-rows")).write_bytes(pickle.dumps(collected.made_by))
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
