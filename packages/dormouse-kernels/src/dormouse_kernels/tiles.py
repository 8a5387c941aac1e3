"""Tile sizes that a call may bring along, `tiles=`, in place of the table's row for its card; and as files.

Another tile changes the order of a sum at most, so results agree to rounding. `python -m dormouse_kernels.tune` writes
the files.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from dormouse_kernels.moe.grouped.tiles import Tile as GroupedTile
from dormouse_kernels.moe.grouped.tiles import Tiles as GroupedTiles
from dormouse_kernels.moe.latent.tiles import Tiles as LatentTiles

__all__ = ["GroupedTile", "GroupedTiles", "LatentTiles", "read", "write"]

KINDS: dict[str, type[LatentTiles] | type[GroupedTiles]] = {
    "latent_glu_experts": LatentTiles,
    "glu_experts": GroupedTiles,
}
"""What each op takes as `tiles`."""


def write(path: Path, op: str, tiles: LatentTiles | GroupedTiles, *, origin: str = "") -> None:
    """Writes the tiles of `op` as JSON; `origin` says where they are from."""
    path.write_text(json.dumps({"op": op, "origin": origin, "tiles": dataclasses.asdict(tiles)}, indent=2) + "\n")


def read(path: Path, op: str) -> LatentTiles | GroupedTiles:
    """The tiles that `write` wrote for `op`. Errors: `ValueError` for a file of another op or with other fields."""
    try:
        written: dict[str, Any] = json.loads(path.read_text())
        if written["op"] != op:
            raise ValueError(f"read: {path} holds tiles of {written['op']}; pass the file that was written for {op}")
        if KINDS[op] is LatentTiles:
            return LatentTiles(**written["tiles"])
        return GroupedTiles(**{name: GroupedTile(**sizes) for name, sizes in written["tiles"].items()})
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"read: {path} holds no tiles of {op} ({error}); pass a file that `write` wrote") from error
