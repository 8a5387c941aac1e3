"""Tile sizes of the grouped products: what each class of machine runs, and nothing chosen at run time by timing."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """Block of one kernel: rows × cols of the result, depth of the contraction at a time, warps, blocks in flight."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    """Tiles that go through their columns together."""
    piece: int = 32
    """Columns at a time that go through the GLU's gradient, which would not fit in the registers whole."""
    persistent: int = 0
    """Programs a multiprocessor that take tile after tile; 0: a program a tile. Not for weight gradients."""


@dataclass(frozen=True)
class Tiles:
    """The tile of every launch. For weight gradients rows × cols are of a matrix and depth is sorted rows."""

    up: Tile
    """x · gate_up: cols of the gate and as many of the up half."""
    down: Tile
    gate: Tile
    """dy · down, with the GLU's gradient behind it."""
    dx: Tile
    grad_up: Tile
    grad_down: Tile
    mm: Tile
    wgrad: Tile

    @property
    def rows(self) -> int:
        """Rows of the tiles that a forward reads first."""
        return self.up.rows


def _every(tile: Tile, up: Tile, wgrad: Tile, gate: Tile) -> Tiles:
    return Tiles(up=up, down=tile, gate=gate, dx=tile, grad_up=wgrad, grad_down=wgrad, mm=tile, wgrad=wgrad)


SM_90 = Tiles(
    up=Tile(128, 128, 64, 8, 3),
    down=Tile(128, 256, 64, 8, 3),
    gate=Tile(128, 128, 64, 8, 4),
    dx=Tile(128, 256, 64, 8, 3),
    grad_up=Tile(256, 128, 64, 8, 3),
    grad_down=Tile(128, 256, 64, 8, 3),
    mm=Tile(128, 256, 64, 8, 3),
    wgrad=Tile(128, 256, 64, 8, 3),
)
"""For wgmma and 227 KiB of shared memory a block; the best of 15 to 19 each at Qwen3's sizes on an H200."""
SM_90_SHORT = _every(Tile(64, 128, 64, 4, 4), Tile(64, 64, 64, 4, 4), Tile(128, 128, 32, 8, 3), Tile(64, 128, 64, 4, 4))
"""The same for experts of few rows: half the rows a tile."""
SM_120 = _every(Tile(128, 128, 32, 8, 4), Tile(128, 64, 32, 8, 4), Tile(128, 128, 32, 8, 3), Tile(128, 128, 32, 8, 4))
"""For mma.sync and 99 KiB of shared memory; sm_80, 86 and 89 take it too. Compiled for, not measured."""
SM_120_SHORT = _every(Tile(64, 128, 32, 4, 4), Tile(64, 64, 32, 4, 4), Tile(64, 128, 32, 4, 3), Tile(64, 128, 32, 4, 4))
WIDE = _every(Tile(64, 32, 32, 8, 2), Tile(64, 16, 32, 8, 2), Tile(64, 32, 32, 8, 2), Tile(64, 32, 32, 8, 2))
"""For four-byte operands, anywhere."""
INTERPRETED = _every(*[Tile(16, 16, 16, 4, 2, group=2, piece=8)] * 4)
"""For the interpreter: small tiles, so that small cases have several."""
SHORT_ROWS = 96
"""Rows an expert on average up to which the short tiles waste less: half of a 128-row tile is then empty."""


def tiles_for(capability: tuple[int, int] | None, itemsize: int, rows_an_expert: float) -> Tiles:
    """The table's row for a compute capability (None: the interpreter), the operands' bytes and an expert's rows."""
    if capability is None:
        return INTERPRETED
    if itemsize > 2:
        return WIDE
    short = rows_an_expert <= SHORT_ROWS
    if capability[0] in (9, 10):
        return SM_90_SHORT if short else SM_90
    return SM_120_SHORT if short else SM_120


def tiles_on(device: torch.device, dtype: torch.dtype, rows_an_expert: float) -> Tiles:
    """The row for operands of `dtype` on a device."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return tiles_for(capability, dtype.itemsize, rows_an_expert)
