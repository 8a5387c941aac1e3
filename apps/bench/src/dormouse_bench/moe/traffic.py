"""What each launch of the latent expert pass moves and computes, from its sizes, its routing and its tiles.

Bytes are those that leave the multiprocessors: a gathered row counts each time, a bank once a tile. Rows of 2 bytes an
element, partial sums of 4. Letters: R rows, N tiles, L rows of experts with more than one tile; others as in `shapes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dormouse_bench.moe.costs import Cost
from dormouse_bench.moe.shapes import Shape

TILED = ("latent_rows", "expand_rows", "grad_v_rows", "grad_u_rows")
"""Kernels with programs for as many tiles as any routing could make: those without rows leave at once."""
_ITEM, _PART = 2, 4


@dataclass(frozen=True)
class Loads:
    """A routing as the kernels see it."""

    tiles: int
    """Tiles with rows, N."""
    long: int
    """Experts with more than one tile; their weight gradients have launches of their own."""
    long_rows: int


def loads(counts: torch.Tensor, tile_rows: int) -> Loads:
    """Of rows an expert, [E]."""
    longer = counts > tile_rows
    tiles = int(((counts + tile_rows - 1) // tile_rows).sum())
    return Loads(tiles, int(longer.sum()), int(counts[longer].sum()))


def traffic(kernel: str, shape: Shape, routing: Loads, *, tile_rows: int, turns: bool = True, width: int = 0) -> Cost:
    """Bytes and operations of one launch, by its kernel's name; `width` the columns of `sum_slots`.

    Errors: `ValueError` for a kernel that this pass does not launch.
    """
    tokens, rows, d, r, f, experts = shape.tokens, shape.rows, shape.d, shape.r, shape.f, shape.experts
    u, v, latents = 2 * r * d, f * r, 2 * r * rows
    short = experts - routing.long
    tile = 2 * routing.tiles * tile_rows
    parts = _PART * routing.tiles * 2 * r
    # each token's first row is stored; with turns the others are read, added to and stored again
    out = tokens * f + 2 * (rows - tokens) * f if turns else rows * f
    table = {
        "count_blocks": (8 * rows, 0),
        "scan_bins": (0, 0),
        "place_slots": (24 * rows, 0),
        "latent_rows": (_ITEM * (routing.tiles * u + rows * d + latents + rows * r), tile * u),
        "expand_rows": (_ITEM * (routing.tiles * v + rows * r + out), tile * v),
        "sum_slots": (_ITEM * (rows + tokens) * width, 0),
        "grad_v_rows": (_ITEM * ((routing.tiles + short) * v + rows * (f + r) + 2 * latents) + parts, 2 * tile * v),
        "long_grad_v": (_ITEM * (routing.long_rows * (f + r) + routing.long * v), 2 * routing.long_rows * v),
        "grad_u_rows": (_ITEM * ((routing.tiles + short) * u + 2 * rows * d + latents) + parts, 2 * tile * u),
        "long_grad_u": (_ITEM * (routing.long_rows * (d + 2 * r) + routing.long * u), 2 * routing.long_rows * u),
    }
    if kernel not in table:
        raise ValueError(f"traffic: kernel is {kernel!r}; this model knows {', '.join(table)}")
    return Cost(*table[kernel])
