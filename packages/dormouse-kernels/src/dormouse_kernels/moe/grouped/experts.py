"""SwiGLU experts over the grouped kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from dormouse_kernels.moe.grouped import launches
from dormouse_kernels.moe.grouped.sources import SLOT, SORTED, TOKEN
from dormouse_kernels.moe.grouped.tiles import Tile, Tiles
from dormouse_kernels.moe.passes import Gradients, Operands
from dormouse_kernels.moe.routing import Routing, TileMap


@dataclass(frozen=True)
class SwigluPass:
    """`Σ_j w_j down_e (silu(gate_e x) · (up_e x))` in Triton. Keeps the projections [R, 2I]."""

    routing: Routing
    tiles: Tiles
    dtype: torch.dtype
    maps: dict[int, TileMap]
    """The tile map for each number of rows that the tiles ask for."""

    @classmethod
    def over(cls, routing: Routing, dtype: torch.dtype, tiles: Tiles | None = None) -> Self:
        """The pass over a routing, with the tiles of its device unless others are given."""
        tiles = tiles or launches.tiles_of(routing, dtype)
        asked = {tile.rows for tile in (tiles.up, tiles.down, tiles.gate, tiles.dx)}
        return cls(routing, tiles, dtype, {rows: routing.cut(rows) for rows in sorted(asked)})

    def forward(self, operands: Operands) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The result [T, D], and the projections."""
        x, weights = rows_of(operands.hidden_states, self.dtype), operands.top_k_weights.contiguous()
        up = self.tiles.up
        pre, act = launches.gated(x, operands.gate_up_proj, weights, self.routing, self.maps[up.rows], up)
        rows = self._multiply(act, operands.down.mT, self.tiles.down)
        return launches.sum_by_token(rows, self.routing, self.dtype), [pre]

    def backward(
        self, operands: Operands, saved: list[torch.Tensor], grad: torch.Tensor, wanted: tuple[bool, ...]
    ) -> Gradients:
        """The weighted activation is made again; every weight gradient is written once."""
        need_x, need_up, _, need_down, need_weights = wanted[:5]
        gate_up, down = operands.gate_up_proj, operands.down
        tiles, routing = self.tiles, self.routing
        dout = rows_of(grad, self.dtype)
        dpre, act, dweights = launches.gate_gradients(
            dout, down, saved[0], operands.top_k_weights.contiguous(), routing, self.maps[tiles.gate.rows], tiles.gate
        )
        dx = dup = ddown = None
        if need_down:
            ddown = torch.empty_like(down, memory_format=torch.contiguous_format)
            launches.wgrad(dout, act, routing, ddown, tiles.grad_down, sources=(TOKEN, SORTED))
        del act
        if need_up:
            dup = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
            x = rows_of(operands.hidden_states, self.dtype)
            launches.wgrad(dpre, x, routing, dup, tiles.grad_up, sources=(SORTED, TOKEN))
        if need_x:
            rows = self._multiply(dpre, gate_up, tiles.dx)
            dx = launches.sum_by_token(rows, routing, operands.hidden_states.dtype)
        return dx, dup, None, ddown, dweights if need_weights else None

    def _multiply(self, rows: torch.Tensor, bank: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Sorted rows times their experts' matrices, by slot."""
        return launches.multiply(rows, bank, self.routing, self.maps[tile.rows], tile, source=SORTED, target=SLOT)


def rows_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` [n, m] in `dtype`, contiguous along m."""
    x = x.to(dtype)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
