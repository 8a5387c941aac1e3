"""SwiGLU experts as one autograd function over the grouped kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dormouse_kernels.moe.grouped import launches
from dormouse_kernels.moe.grouped.launches import SLOT, SORTED, TOKEN
from dormouse_kernels.moe.grouped.tiles import Tile, Tiles
from dormouse_kernels.moe.routing import Routing, TileMap


class SwigluExperts(torch.autograd.Function):
    """`Σ_j w_j down_e (silu(gate_e x) · (up_e x))`. Saves its arguments and the projections [R, 2I]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        routing: Routing,
        tiles: Tiles,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.x_dtype = x.dtype
        x, weights = rows_of(x, dtype), weights.contiguous()
        maps = maps_for(routing, (tiles.up, tiles.down))
        pre, act = launches.gated(x, gate_up, weights, routing, maps[tiles.up.rows], tiles.up)
        rows = launches.multiply(
            act, down.mT, routing, maps[tiles.down.rows], tiles.down, source=SORTED, target=SLOT
        )  # fmt: skip
        ctx.save_for_backward(x, gate_up, down, weights, pre)
        ctx.routing, ctx.tiles, ctx.maps = routing, tiles, maps
        return launches.sum_by_token(rows, routing, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate_up, down, weights, pre = ctx.saved_tensors
        need_x, need_up, need_down, need_weights = ctx.needs_input_grad[:4]
        routing, tiles = ctx.routing, ctx.tiles
        maps = maps_for(routing, (tiles.gate, tiles.dx), ctx.maps)
        dout = rows_of(dout, pre.dtype)
        dpre, act, dweights = launches.gate_gradients(
            dout, down, pre, weights, routing, maps[tiles.gate.rows], tiles.gate
        )
        dx = dup = ddown = None
        if need_down:
            ddown = torch.empty_like(down, memory_format=torch.contiguous_format)
            launches.wgrad(dout, act, routing, ddown, tiles.grad_down, sources=(TOKEN, SORTED))
        del act
        if need_up:
            dup = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
            launches.wgrad(dpre, x, routing, dup, tiles.grad_up, sources=(SORTED, TOKEN))
        if need_x:
            rows = launches.multiply(
                dpre, gate_up, routing, maps[tiles.dx.rows], tiles.dx, source=SORTED, target=SLOT
            )  # fmt: skip
            dx = launches.sum_by_token(rows, routing, ctx.x_dtype)
        return dx, dup, ddown, dweights if need_weights else None, None, None, None


def swiglu_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    tiles: Tiles,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The pass over checked arguments, [T, D] in `dtype`."""
    return SwigluExperts.apply(x, gate_up, down, weights, routing, tiles, dtype)


def rows_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` [n, m] in `dtype`, contiguous along m."""
    x = x.to(dtype)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def maps_for(routing: Routing, tiles: Iterable[Tile], made: dict[int, TileMap] | None = None) -> dict[int, TileMap]:
    """A tile map for each number of rows that `tiles` ask for, those `made` already kept."""
    maps = dict(made or {})
    for tile in tiles:
        if tile.rows not in maps:
            maps[tile.rows] = routing.cut(tile.rows)
    return maps
