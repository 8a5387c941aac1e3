"""Rows by expert and the tiles they are cut into: made once for a routing, on the device, with no host sync."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dormouse_kernels.launch import launch
from dormouse_kernels.moe.latent import sort
from dormouse_kernels.moe.latent.tiles import Tiles
from dormouse_kernels.moe.route import Routing

_BLOCK = 256
_MAPPED = 8


@dataclass(frozen=True, eq=False)
class Plan:
    """What the kernels index by. R = T·k rows, E experts; shapes depend on (T, k, E) and the tile alone."""

    index: torch.Tensor
    """[T, k], contiguous."""
    num_experts: int
    counts: torch.Tensor
    """[E] int64."""
    offsets: torch.Tensor
    """[E + 1] int64."""
    order: torch.Tensor
    """[R]: the flat slot of each sorted row."""
    inverse: torch.Tensor
    """[R]: the sorted row of each flat slot."""
    tile_start: torch.Tensor
    """[E + 2] int32: an expert's first tile; the sentinels' first tile; the number of tiles."""
    tile_map: torch.Tensor
    """[max_tiles · 4] int32: expert (-1: no tile), first row, end row, tiles of the expert."""
    long: torch.Tensor
    """[E + 1] int32: how many experts have more than one tile, then they."""
    max_tiles: int
    tiles: Tiles
    """The block sizes of every launch over these rows."""

    @property
    def top_k(self) -> int:
        """Choices a token, k."""
        return self.index.shape[1]

    def routing(self, top_k_index: torch.Tensor) -> Routing:
        """The same as a `Routing`, but with int32 rows."""
        return Routing(top_k_index, self.num_experts, self.counts, self.offsets, self.order, self.inverse)


def make_plan(top_k_index: torch.Tensor, num_experts: int, tiles: Tiles) -> Plan:
    """Sorts the slots of `top_k_index` [T, k] int by expert, stably, and cuts each expert's rows into tiles.

    Three launches; at most 4094 experts, since one program of the scan holds a bin an expert.
    """
    index = top_k_index.contiguous()
    slots, device = index.numel(), index.device
    bins = _power_of_two(num_experts + 2)
    blocks = max(1, -(-slots // _BLOCK))
    rows = tiles.rows
    max_tiles = num_experts + 1 + -(-slots // rows)
    sizes = (4 * max_tiles, blocks * bins, bins, slots, slots, num_experts + 2, num_experts + 1, 1)
    tile_map, hist, total, order, inverse, tile_start, long, arrived = _carve(sizes, device)
    longs = torch.empty(2 * num_experts + 1, dtype=torch.int64, device=device)
    offsets, counts = longs[: num_experts + 1], longs[num_experts + 1 :]
    shared = {"R": slots, "E": num_experts, "BINS": bins, "BLOCK": _BLOCK}
    launch(sort.count_blocks, (blocks,), {"index_ptr": index, "hist_ptr": hist, "arrived_ptr": arrived, **shared})
    columns = min(16, bins)
    launch(
        sort.scan_bins,
        (bins // columns,),
        {
            "hist_ptr": hist, "total_ptr": total, "arrived_ptr": arrived, "counts_ptr": counts, "offsets_ptr": offsets,
            "tile_start_ptr": tile_start, "long_ptr": long, "E": num_experts, "blocks": blocks, "BINS": bins,
            "COLS": columns, "ROWS": 128, "TILE": rows,
        },
    )  # fmt: skip
    launch(
        sort.place_slots,
        (blocks + -(-max_tiles // _MAPPED),),
        {
            "index_ptr": index, "hist_ptr": hist, "offsets_ptr": offsets, "tile_start_ptr": tile_start,
            "order_ptr": order, "inverse_ptr": inverse, "map_ptr": tile_map, "blocks": blocks, "max_tiles": max_tiles,
            "TILE": rows, "TILES": _MAPPED, "EXPERTS": min(1024, bins), **shared,
        },
        num_warps=8,
    )  # fmt: skip
    return Plan(index, num_experts, counts, offsets, order, inverse, tile_start, tile_map, long, max_tiles, tiles)


def _carve(sizes: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """int32 views of one buffer, each starting 16-byte aligned: an allocation costs more than some of the kernels."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 4) * 4)
    buffer = torch.empty(starts[-1], dtype=torch.int32, device=device)
    return [buffer[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
