"""Cutting each expert's rows into tiles: which program of a kernel works on which rows, known on the device alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class TileMap:
    """Tiles of at most `rows` sorted rows of one expert. Shapes depend on (T, k, E) and `rows`, never on the indices.

    An expert without rows has a tile too, of no rows: a program must exist to write its zeros.
    """

    rows: int
    start: torch.Tensor
    """[E + 2] int32: an expert's first tile; the sentinels' first tile; the number of tiles."""
    tiles: torch.Tensor
    """[max_tiles · 4] int32: expert (-1: no tile, and zeros; E: sentinels), first row, end row, tiles of the expert."""
    long: torch.Tensor
    """[E + 1] int32: how many experts have more than one tile, then they, then the others, both ascending."""
    max_tiles: int


def most_tiles(rows: int, num_experts: int, slots: int) -> int:
    """Tiles that suffice for any routing: one an expert and one for sentinels, and the full ones."""
    return num_experts + 1 + -(-slots // rows)


def cut(counts: torch.Tensor, offsets: torch.Tensor, slots: int, rows: int) -> TileMap:
    """The tile map of `counts` [E] and `offsets` [E + 1] over `slots` sorted rows, in plain torch; no host sync."""
    num_experts, device = counts.numel(), counts.device
    max_tiles = most_tiles(rows, num_experts, slots)
    sentinels = slots - offsets[-1:]
    tiles = torch.cat([((counts + rows - 1) // rows).clamp_(min=1), (sentinels + rows - 1) // rows])
    start = torch.cat([tiles.new_zeros(1), tiles.cumsum(0)])
    tile = torch.arange(max_tiles, device=device)
    expert = torch.searchsorted(start[1:], tile, right=True)
    inside = expert.clamp(max=num_experts)
    begin = offsets[inside] + (tile - start[inside]) * rows
    ends = torch.cat([offsets[1:], offsets.new_full((1,), slots)])
    end = torch.minimum(begin + rows, ends[inside])
    spare = expert > num_experts
    words = torch.stack([expert, begin, end, tiles[inside]], dim=1).masked_fill_(spare.unsqueeze(1), 0)
    words[:, 0].masked_fill_(spare, -1)
    several = tiles[:-1] > 1
    # experts of several tiles first, each half in ascending order
    ranked = torch.sort(torch.where(several, 0, 1), stable=True).indices
    long = torch.cat([several.sum().view(1), ranked])
    return TileMap(
        rows=rows,
        start=start.to(torch.int32),
        tiles=words.to(torch.int32).view(-1),
        long=long.to(torch.int32),
        max_tiles=max_tiles,
    )
