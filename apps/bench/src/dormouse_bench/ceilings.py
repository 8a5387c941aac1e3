"""What the machine can do at best, with torch alone: bytes copied a second, and multiply-adds of a matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dormouse_bench.rows import Origin, Row
from dormouse_bench.timing import peak_extra_bytes, race

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Ceiling:
    """One ceiling: its row, and its rate in the unit that people quote."""

    row: Row
    rate: float
    unit: str


def copy(mebibytes: int, device: str, rounds: int, origin: Origin) -> Ceiling:
    """A copy of that many mebibytes; the rate counts bytes read and bytes written."""
    source = torch.empty(mebibytes * MEBIBYTE, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    ms = _time(lambda: target.copy_(source), device, rounds)
    row = _row("copy", f"{mebibytes}mib", ms, peak_extra_bytes(lambda: target.copy_(source), device), origin)
    return Ceiling(row, 2 * source.numel() / ms / 1e6, "GB/s")


def gemm(size: int, dtype: torch.dtype, device: str, rounds: int, origin: Origin) -> Ceiling:
    """A product of two square matrices of that size; the rate counts a multiplication and an addition apart."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    ms = _time(lambda: torch.mm(a, b, out=out), device, rounds)
    shape = f"{size}-{str(dtype).removeprefix('torch.')}"
    row = _row("gemm", shape, ms, peak_extra_bytes(lambda: torch.mm(a, b, out=out), device), origin)
    return Ceiling(row, 2 * size**3 / ms / 1e9, "TFLOP/s")


def rate(row: Row) -> float:
    """Bytes or operations a second that a kept row of `copy` or `gemm` says. Errors: `ValueError` for another row."""
    size, _, unit = row.shape.partition("-")
    if row.phase == "gemm" and unit:
        return 2 * int(size) ** 3 / row.ms * 1e3
    if row.phase == "copy" and row.shape.endswith("mib"):
        return 2 * int(row.shape.removesuffix("mib")) * MEBIBYTE / row.ms * 1e3
    raise ValueError(f"rate: the row is of {row.phase} {row.shape}; pass one of copy or gemm")


def ceilings(device: str, rounds: int, origin: Origin) -> list[Ceiling]:
    """The copy rate and the GEMM rate, at sizes that leave every cache behind and take seconds at most."""
    if device == "cuda":
        return [copy(1024, device, rounds, origin), gemm(8192, torch.bfloat16, device, rounds, origin)]
    return [copy(512, device, rounds, origin), gemm(1024, torch.float32, device, rounds, origin)]


def _time(work, device: str, rounds: int) -> float:
    if device != "cuda":
        return race({"torch": work}, device, rounds).ms["torch"]
    from triton.testing import do_bench

    return float(do_bench(work, return_mode="median"))


def _row(phase: str, shape: str, ms: float, extra: int | None, origin: Origin) -> Row:
    return Row(
        bench="ceilings", shape=shape, phase=phase, implementation="torch", ms=ms, floor_ms=None,
        peak_extra_bytes=extra, **origin.model_dump(),
    )  # fmt: skip
