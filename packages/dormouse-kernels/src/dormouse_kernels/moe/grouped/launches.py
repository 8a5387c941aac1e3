"""Allocation, grids and tiles of the grouped products. Nothing here reads the device."""

from __future__ import annotations

from typing import Any

import torch

from dormouse_kernels.launch import launch
from dormouse_kernels.moe.grouped import backward, forward
from dormouse_kernels.moe.grouped.sources import SORTED
from dormouse_kernels.moe.grouped.tiles import Tile, Tiles, tiles_on
from dormouse_kernels.moe.latent.launches import sum_slots
from dormouse_kernels.moe.routing import Routing, TileMap


def tiles_of(routing: Routing, dtype: torch.dtype) -> Tiles:
    """The table's row for operands of `dtype` on the routing's device."""
    return tiles_on(routing.order.device, dtype, routing.order.numel() / routing.num_experts)


def multiply(
    a: torch.Tensor, b: torch.Tensor, routing: Routing, tile_map: TileMap, tile: Tile, *, source: int, target: int
) -> torch.Tensor:
    """[R, N] in a's dtype: a's row of sorted row i times b[expert of i], at row i (SORTED) or at its slot (SLOT)."""
    k, n = b.shape[1:]
    out = torch.empty(routing.order.numel(), n, dtype=a.dtype, device=a.device)
    launch(
        forward.multiply_rows,
        (_programs(tile, tile_map.max_tiles * -(-n // tile.cols), a.device),),
        {
            "a_ptr": a, "b_ptr": b, "out_ptr": out, "order_ptr": routing.order, "map_ptr": tile_map.tiles,
            "start_ptr": tile_map.start, "a_row": a.stride(0), "a_col": a.stride(1), "b_expert": b.stride(0),
            "b_row": b.stride(1), "b_col": b.stride(2), "E": b.shape[0], "K": k, "N": n,
            "max_tiles": tile_map.max_tiles, "SOURCE": source, "TARGET": target, "TOP_K": routing.top_k,
            **_blocks(tile, k, n, a.dtype, out.shape[0]),
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return out


def wgrad(
    a: torch.Tensor,
    g: torch.Tensor,
    routing: Routing,
    out: torch.Tensor,
    tile: Tile,
    *,
    sources: tuple[int, int],
    accumulate: bool = False,
) -> None:
    """Writes out [E, K, N] = Σ over an expert's rows of aᵀ g, or adds it there. a and g of one dtype."""
    experts, k, n = out.shape
    blocks = _blocks(tile, k, n, a.dtype, 0)
    del blocks["GROUP"], blocks["PERSISTENT"]
    launch(
        backward.bank_gradients,
        (experts * -(-k // tile.rows) * -(-n // tile.cols),),
        {
            "a_ptr": a, "g_ptr": g, "out_ptr": out, "order_ptr": routing.order, "offsets_ptr": routing.offsets,
            "a_row": a.stride(0), "a_col": a.stride(1), "g_row": g.stride(0), "g_col": g.stride(1),
            "out_expert": out.stride(0), "out_row": out.stride(1), "out_col": out.stride(2), "K": k, "N": n,
            "A_SOURCE": sources[0], "G_SOURCE": sources[1], "TOP_K": routing.top_k, "ACCUMULATE": accumulate,
            **blocks, "EVEN_K": k % tile.rows == 0, "EVEN_N": n % tile.cols == 0,
        },
        num_warps=tile.warps,
        # a row that is looked up in the loop is loaded in two steps: the pipeliner then keeps half as many in flight
        num_stages=tile.stages if sources == (SORTED, SORTED) else 2 * tile.stages - 1,
    )  # fmt: skip


def gated(
    x: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor, routing: Routing, tile_map: TileMap, tile: Tile
) -> tuple[torch.Tensor, torch.Tensor]:
    """(pre [R, 2I], act [R, I]) by sorted row: the two projections, and the weighted activation."""
    experts, double, width = gate_up.shape
    inner, slots = double // 2, routing.order.numel()
    pre = torch.empty(slots, double, dtype=x.dtype, device=x.device)
    act = torch.empty(slots, inner, dtype=x.dtype, device=x.device)
    launch(
        forward.gated_rows,
        (_programs(tile, tile_map.max_tiles * -(-inner // tile.cols), x.device),),
        {
            "x_ptr": x, "gate_up_ptr": gate_up, "weight_ptr": weights, "pre_ptr": pre, "act_ptr": act,
            "order_ptr": routing.order, "map_ptr": tile_map.tiles, "start_ptr": tile_map.start, "x_row": x.stride(0),
            "bank_expert": gate_up.stride(0), "bank_row": gate_up.stride(1), "E": experts, "D": width, "INNER": inner,
            "max_tiles": tile_map.max_tiles, "TOP_K": routing.top_k, **_blocks(tile, width, inner, x.dtype, slots),
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return pre, act


def gate_gradients(
    dy: torch.Tensor,
    down: torch.Tensor,
    pre: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    tile_map: TileMap,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dpre [R, 2I], act [R, I], dweights [T, k]): the GLU's gradients, and its weighted activation made again."""
    experts, width, inner = down.shape
    slots, blocks = routing.order.numel(), -(-inner // tile.cols)
    dpre = torch.empty_like(pre)
    act = torch.empty(slots, inner, dtype=pre.dtype, device=pre.device)
    parts = torch.empty(blocks, slots, dtype=torch.float32, device=pre.device)
    launch(
        backward.gate_gradients,
        (_programs(tile, tile_map.max_tiles * blocks, pre.device),),
        {
            "dy_ptr": dy, "down_ptr": down, "pre_ptr": pre, "weight_ptr": weights, "dpre_ptr": dpre, "act_ptr": act,
            "part_ptr": parts, "order_ptr": routing.order, "map_ptr": tile_map.tiles,
            "start_ptr": tile_map.start, "dy_row": dy.stride(0),
            "bank_expert": down.stride(0), "bank_row": down.stride(1), "E": experts, "R": slots, "D": width,
            "INNER": inner, "max_tiles": tile_map.max_tiles, "TOP_K": routing.top_k,
            "PIECE": tile.piece, **_blocks(tile, width, inner, pre.dtype, slots),
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    dweights = torch.empty(routing.top_k_index.shape, dtype=weights.dtype, device=pre.device)
    rows = 256
    if slots:
        launch(
            backward.sum_parts,
            (-(-slots // rows),),
            {
                "part_ptr": parts, "dweight_ptr": dweights, "order_ptr": routing.order,
                "offsets_ptr": routing.offsets, "E": experts, "R": slots, "blocks": blocks, "ROWS": rows,
            },
        )  # fmt: skip
    return dpre, act, dweights


def sum_by_token(rows: torch.Tensor, routing: Routing, dtype: torch.dtype) -> torch.Tensor:
    """[T, n]: each token's k rows of [T·k, n], summed in fp32 in the order of its slots."""
    if routing.top_k == 1:
        return rows.to(dtype)
    out = torch.empty(routing.top_k_index.shape[0], rows.shape[1], dtype=dtype, device=rows.device)
    sum_slots(rows, None, out, routing.top_k, rows.shape[1], pdl=False)
    return out


def _programs(tile: Tile, items: int, device: torch.device) -> int:
    if not tile.persistent:
        return items
    cuda = device.type == "cuda"
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 2
    return min(items, tile.persistent * multiprocessors)


def _blocks(tile: Tile, k: int, n: int, dtype: torch.dtype, slots: int) -> dict[str, Any]:
    # fp32 operands: exact products, never tf32; the word means nothing to narrower ones
    precision = "ieee" if dtype == torch.float32 else "tf32"
    return {
        "ROWS": tile.rows, "COLS": tile.cols, "DEPTH": tile.depth, "GROUP": tile.group,
        "EVEN_K": k % tile.depth == 0, "EVEN_N": n % tile.cols == 0, "PRECISION": precision,
        # an idle tile of a persistent program reads a row: there must be one
        "PERSISTENT": tile.persistent > 0 and slots > 0,
    }  # fmt: skip
