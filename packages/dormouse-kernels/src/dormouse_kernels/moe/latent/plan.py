"""What the kernels of one latent expert pass index by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dormouse_kernels.moe.latent.tiles import Tiles
from dormouse_kernels.moe.routing import Routing, TileMap


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows by expert, the tiles they are cut into, and the block sizes of every launch over them."""

    routing: Routing
    index: torch.Tensor
    """[T, k], contiguous."""
    cut: TileMap
    tiles: Tiles

    @property
    def slots(self) -> int:
        """R = T·k rows."""
        return self.routing.order.numel()

    @property
    def top_k(self) -> int:
        """Choices a token, k."""
        return self.index.shape[1]


def plan_for(routing: Routing, tiles: Tiles) -> Plan:
    """The plan of a pass over `routing`; makes the tile map where the routing has none of that size."""
    return Plan(routing, routing.top_k_index.contiguous(), routing.cut(tiles.rows), tiles)
