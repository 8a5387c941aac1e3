"""Routing: from the experts that each token chose to rows sorted by expert and cut into tiles."""

from dormouse_kernels.moe.routing.route import Routing, route
from dormouse_kernels.moe.routing.tilemap import TileMap

__all__ = ["Routing", "TileMap", "route"]
