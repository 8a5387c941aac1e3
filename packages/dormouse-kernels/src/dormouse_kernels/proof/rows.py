"""The rows of the two tables that prove kernels: values against an oracle, and what the compiler made of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from dormouse_kernels.aot import Compiled

Level = Literal["reference", "interpreter", "gpu"]
LEVELS: tuple[str, ...] = get_args(Level)


@dataclass(frozen=True)
class ParityRow:
    """One implementation held to its oracle on one shape."""

    op: str
    shape: str
    dtype: str
    level: Level
    """Where it ran: plain torch, Triton's interpreter, or a GPU."""
    bound: float
    errors: Mapping[str, float] | None
    """Relative error by tensor; None where this machine cannot run the level."""
    kernels: tuple[str, ...] = ()
    """Every `@triton.jit` function that ran, `module.name`."""

    @property
    def over(self) -> dict[str, float]:
        """The tensors whose error is over the bound, or NaN."""
        return {name: error for name, error in (self.errors or {}).items() if not error <= self.bound}

    @property
    def verdict(self) -> str:
        """`ok`, `FAIL` with the tensors, or `not run`."""
        if self.errors is None:
            return "not run"
        return f"FAIL {', '.join(self.over)}" if self.over else "ok"

    def cells(self) -> tuple[str, ...]:
        """The row's columns, as in `PARITY_COLUMNS`."""
        errors = " ".join(f"{name} {error:.1e}" for name, error in (self.errors or {}).items())
        return self.op, self.shape, self.dtype, self.level, errors or "-", f"{self.bound:.0e}", self.verdict


PARITY_COLUMNS = ("op", "shape", "dtype", "level", "worst relative error by tensor", "bound", "verdict")


@dataclass(frozen=True)
class CompilerRow:
    """One kernel at one tile on one architecture, held to what the card allows."""

    compiled: Compiled
    tile: str
    shared_limit: int
    spill_limit: int = 0
    narrow_limit: int = 0
    """Global accesses of at most two bytes that are accepted."""
    kernels: tuple[str, ...] = ()
    """Every `@triton.jit` function that was compiled, `module.name`."""

    @property
    def over(self) -> dict[str, str]:
        """What exceeds its limit: `{"shared": "147456 > 101376"}`."""
        held = {
            "shared": (self.compiled.shared, self.shared_limit),
            "spills": (self.compiled.spills, self.spill_limit),
            "narrow accesses": (self.compiled.narrow_accesses, self.narrow_limit),
        }
        return {name: f"{got} > {limit}" for name, (got, limit) in held.items() if got > limit}

    def cells(self) -> tuple[str, ...]:
        """The row's columns, as in `COMPILER_COLUMNS`."""
        built = self.compiled
        kinds = (("ld", built.loads), ("st", built.stores), ("cp", built.async_copies))
        widths = [f"{kind} {_widths(counts)}" for kind, counts in kinds if counts]
        limit = f"{self.shared_limit} B, {self.spill_limit} spilled, {self.narrow_limit} narrow"
        verdict = "FAIL " + ", ".join(f"{name} {by}" for name, by in self.over.items()) if self.over else "ok"
        return (
            built.kernel.rpartition(".")[2],
            self.tile,
            f"sm_{built.arch}",
            str(built.shared),
            str(built.registers),
            str(built.spills),
            "; ".join(widths) or "-",
            limit,
            verdict,
        )


COMPILER_COLUMNS = ("kernel", "tile", "arch", "shared", "registers", "spills", "access widths", "limit", "verdict")


def _widths(counts: Mapping[int, int]) -> str:
    return " ".join(f"{n}×{width}B" for width, n in sorted(counts.items()))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a plain-text table, columns padded to their widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * width for width in widths], *rows]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def relative_errors(
    got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], *, by_expert: Collection[str] = ()
) -> dict[str, float]:
    """‖got − want‖ / ‖want‖ by tensor, in fp64; infinite for a NaN, and where a zero was wanted and not given.

    For the names in `by_expert` it is the worst over the first dimension, so that one wrong expert among a thousand
    shows. Errors: `ValueError` unless both hold the same names and shapes.
    """
    if got.keys() != want.keys():
        raise ValueError(f"relative_errors: got {sorted(got)} but want {sorted(want)}; pass the same names")
    errors = {}
    for name in got:
        if got[name].shape != want[name].shape:
            raise ValueError(
                f"relative_errors: {name} is {list(got[name].shape)}, wanted {list(want[name].shape)}; "
                "compare tensors of one shape"
            )
        split = got[name].shape[0] if name in by_expert else 1
        errors[name] = _worst(got[name].detach().cpu().double(), want[name].detach().cpu().double(), split)
    return errors


def _worst(got: torch.Tensor, want: torch.Tensor, parts: int) -> float:
    if got.numel() == 0:
        return 0.0
    off = (got - want).reshape(parts, -1).norm(dim=1)
    size = want.reshape(parts, -1).norm(dim=1)
    error = torch.where(off == 0, 0.0, off / size)
    return float(error.max()) if bool(error.isfinite().all()) else math.inf
