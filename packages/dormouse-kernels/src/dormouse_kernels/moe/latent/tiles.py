"""Tile sizes of the latent expert pass: what each class of machine runs, and nothing chosen at run time by timing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Tiles:
    """Block sizes, warps, pipeline depths and splits of every launch; `rows` is the most rows of a tile."""

    rows: int = 64
    latent_d: int = 64
    latent_warps: int = 4
    latent_stages: int = 3
    expand_f: int = 128
    expand_residual_f: int = 64
    """Columns at a time where a residual is added: 128 would not fit in the registers."""
    expand_warps: int = 4
    expand_stages: int = 2
    expand_splits: int = 8
    grad_v_f: int = 64
    grad_v_warps: int = 4
    grad_v_stages: int = 3
    grad_v_pieces: int = 2
    """Blocks of columns a step."""
    grad_u_d: int = 128
    grad_u_warps: int = 8
    grad_u_stages: int = 3
    grad_u_splits: int = 2
    long_block: int = 64
    long_warps: int = 4
    long_stages: int = 3
    long_programs: int = 264
    turns: bool = True
    """Two experts a token: add up in turns, instead of writing expanded rows and summing them."""
    pdl: bool = True
    """Programmatic dependent launches, from compute capability 9.0 on."""


SM_90 = Tiles()
"""Measured on an H200: wgmma, 227 KiB of shared memory a block; sm_100, with as much, gets the same, compiled only."""
SM_120 = replace(SM_90, grad_v_stages=3, grad_v_pieces=1, grad_u_d=64, long_programs=72)
"""For 99 KiB of shared memory and mma.sync; compiled for, not measured."""
SM_86 = replace(SM_120, pdl=False)
"""sm_86 and sm_89: sm_120's shared memory and mma kind, no dependent launches; compiled for, not measured."""
SM_80 = replace(SM_86, grad_v_warps=8, long_programs=216)
"""163 KiB of shared memory, mma.sync; with four warps dz and dV together would spill. Compiled for, not measured."""
WIDE = Tiles(
    rows=32, latent_d=32, latent_stages=2, expand_f=64, expand_residual_f=32, grad_v_f=16, grad_v_warps=8,
    grad_v_stages=2, grad_v_pieces=1, grad_u_d=32, grad_u_stages=2, long_block=32, long_warps=8, long_stages=2,
)  # fmt: skip
"""For four-byte operands, anywhere: half the rows, so that registers and shared memory hold."""
SM_120_R128 = replace(
    SM_120, rows=32, latent_warps=8, expand_f=64, expand_residual_f=32, expand_warps=8, grad_v_f=32, grad_v_warps=8,
    grad_u_d=32, grad_u_stages=2, long_block=32, long_warps=8, long_stages=2,
)  # fmt: skip
"""Rank 128 in 99 KiB: half the rows, half the columns; compiled for, not measured."""
SM_90_R128 = replace(
    SM_120_R128, rows=64, expand_residual_f=64, grad_v_f=64, grad_u_d=64, long_programs=SM_90.long_programs
)
"""Rank 128 in 227 KiB."""
WIDE_R128 = replace(WIDE, rows=16, expand_warps=8, grad_u_d=16, long_block=16)
"""Rank 128, four-byte operands."""
INTERPRETED = Tiles(
    rows=16,
    latent_d=16,
    expand_f=16,
    expand_residual_f=16,
    expand_splits=2,
    grad_v_f=16,
    grad_u_d=16,
    long_block=16,
    long_programs=2,
    pdl=False,
)
"""For the interpreter: small tiles, so that small cases have several."""


def tiles_for(capability: tuple[int, int] | None, itemsize: int, rank: int) -> Tiles:
    """The table's row for a compute capability (None: the interpreter), the operands' bytes and the rank.

    A card that is newer than the table gets the row of 99 KiB and mma.sync, which fits everywhere.
    """
    if capability is None:
        return INTERPRETED
    pdl = capability >= (9, 0)
    if itemsize > 2:
        return replace(WIDE if rank <= 64 else WIDE_R128, pdl=pdl)
    large = capability[0] in (9, 10)
    if rank > 64:
        return replace(SM_90_R128 if large else SM_120_R128, pdl=pdl)
    if large:
        return SM_90
    if pdl:
        return SM_120
    return SM_80 if capability == (8, 0) else SM_86


def tiles_on(device: torch.device, dtype: torch.dtype, rank: int) -> Tiles:
    """The row for operands of `dtype` and a rank on a device."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return tiles_for(capability, dtype.itemsize, rank)
