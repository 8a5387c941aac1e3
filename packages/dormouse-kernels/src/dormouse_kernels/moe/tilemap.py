"""Tiles of rows: every expert's sorted rows cut into pieces that one program each can take, with no host sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dormouse_kernels.moe.route import Routing


@dataclass(frozen=True, eq=False)
class TileMap:
    """Up to `rows` sorted rows of one expert a tile, in the order of experts; the sentinels' rows come last."""

    rows: int
    """The most rows of a tile."""
    start: torch.Tensor
    """[E + 2] int32: an expert's first tile; the sentinels' first tile; the number of tiles."""
    map: torch.Tensor
    """[max_tiles, 4] int32: expert (E: sentinels, -1: no tile), first row, end row, tiles of the expert."""
    max_tiles: int
    """E + 1 + ⌈R / rows⌉: no routing has more, an expert without rows has one too."""


def tile_map(routing: Routing, rows: int) -> TileMap:
    """Cuts the rows of a `Routing` into tiles of up to `rows`; shapes depend on (T, k, E, rows) alone."""
    experts, slots, device = routing.num_experts, routing.order.numel(), routing.order.device
    max_tiles = experts + 1 + -(-slots // rows)
    with torch.no_grad():
        ends = torch.cat([routing.offsets[1:], routing.offsets.new_full((1,), slots)])
        first = routing.offsets
        tiles = (ends - first + rows - 1).div_(rows, rounding_mode="floor")
        # an expert without rows has a tile too: a program must exist to write its zeros
        tiles[:-1].clamp_(min=1)
        start = torch.zeros(experts + 2, dtype=torch.int64, device=device)
        torch.cumsum(tiles, 0, out=start[1:])
        tile = torch.arange(max_tiles, device=device)
        expert = torch.searchsorted(start[1:], tile, right=True)
        known = expert.clamp(max=experts)
        begin = first[known] + (tile - start[known]) * rows
        end = torch.minimum(begin + rows, ends[known])
        columns = (expert.masked_fill(expert > experts, -1), begin, end, tiles[known])
        return TileMap(rows, start.int(), torch.stack(columns, 1).int(), max_tiles)
