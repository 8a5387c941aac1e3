"""The counting sort's launches: slots by expert and the tiles they are cut into, with no host sync."""

from __future__ import annotations

import torch

from dormouse_kernels.launch import dependent_launches, launch
from dormouse_kernels.moe.routing import kernels
from dormouse_kernels.moe.routing.route import Routing
from dormouse_kernels.moe.routing.tilemap import TileMap, most_tiles

_BLOCK = 256
_EXPERTS = 128


def sort_slots(top_k_index: torch.Tensor, num_experts: int, rows: int) -> Routing:
    """`route` in three launches, with tiles of `rows` rows; at most 4094 experts."""
    index = top_k_index.contiguous()
    slots, device = index.numel(), index.device
    bins = _power_of_two(num_experts + 2)
    blocks = max(1, -(-slots // _BLOCK))
    max_tiles = most_tiles(rows, num_experts, slots)
    sizes = (4 * max_tiles, blocks * bins, bins, slots, slots, num_experts + 2, num_experts + 1, 1)
    tiles, hist, total, order, inverse, start, long, arrived = _carve(sizes, device)
    longs = torch.empty(2 * num_experts + 1, dtype=torch.int64, device=device)
    offsets, counts = longs[: num_experts + 1], longs[num_experts + 1 :]
    pdl = dependent_launches(device)
    shared = {"R": slots, "E": num_experts, "BINS": bins, "BLOCK": _BLOCK, "PDL": pdl}
    counted = {"index_ptr": index, "hist_ptr": hist, "arrived_ptr": arrived, **shared}
    launch(kernels.count_blocks, (blocks,), counted, pdl=pdl)
    columns = min(16, bins)
    launch(
        kernels.scan_bins,
        (bins // columns,),
        {
            "hist_ptr": hist, "total_ptr": total, "arrived_ptr": arrived, "counts_ptr": counts, "offsets_ptr": offsets,
            "tile_start_ptr": start, "long_ptr": long, "E": num_experts, "blocks": blocks, "BINS": bins,
            "COLS": columns, "ROWS": 128, "TILE": rows, "PDL": pdl,
        },
        pdl=pdl,
    )  # fmt: skip
    launch(
        kernels.place_slots,
        (blocks + -(-(num_experts + 1) // _EXPERTS),),
        {
            "index_ptr": index, "hist_ptr": hist, "offsets_ptr": offsets, "tile_start_ptr": start,
            "order_ptr": order, "inverse_ptr": inverse, "map_ptr": tiles, "blocks": blocks, "max_tiles": max_tiles,
            "TILE": rows, "EXPERTS": _EXPERTS, **shared,
        },
        num_warps=8,
        pdl=pdl,
    )  # fmt: skip
    cut = TileMap(rows, start, tiles, long, max_tiles)
    return Routing(top_k_index, num_experts, counts, offsets, order, inverse, cut)


def cut_tiles(offsets: torch.Tensor, slots: int, rows: int) -> TileMap:
    """The tile map of `slots` rows that are sorted already, in two launches; at most 4094 experts."""
    num_experts, device = offsets.numel() - 1, offsets.device
    max_tiles = most_tiles(rows, num_experts, slots)
    tiles, start, long = _carve((4 * max_tiles, num_experts + 2, num_experts + 1), device)
    pdl = dependent_launches(device)
    shared = {
        "offsets_ptr": offsets, "tile_start_ptr": start, "R": slots, "E": num_experts, "TILE": rows, "PDL": pdl,
    }  # fmt: skip
    bins = _power_of_two(num_experts + 2)
    launch(kernels.start_tiles, (1,), {"long_ptr": long, "BINS": bins, **shared}, pdl=pdl)
    mapped = {"map_ptr": tiles, "max_tiles": max_tiles, "EXPERTS": _EXPERTS, **shared}
    launch(kernels.map_experts, (-(-(num_experts + 1) // _EXPERTS),), mapped, pdl=pdl)
    return TileMap(rows, start, tiles, long, max_tiles)


def _carve(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """int32 views of one buffer, each starting 16-byte aligned: an allocation costs more than some of the kernels."""
    pieces = [piece for size in sizes for piece in (size, -size % 4)]
    return torch.empty(sum(pieces), dtype=torch.int32, device=device).split_with_sizes(pieces)[::2]


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
