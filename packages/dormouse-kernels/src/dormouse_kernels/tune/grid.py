"""The tiles around a row of the table: one size changed at a time."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from dormouse_kernels.moe.passes import Tiles

TABLE = "the table's row"
_LEAST_BLOCK = 16
_KEPT = ("pdl", "long_programs", "mm", "wgrad", "group", "piece")
"""What the card decides, what the two ops do not launch, and what only orders programs."""


def grid(row: Tiles, only: str = "") -> dict[str, Tiles]:
    """Candidates by what they change, the row itself first; `only` those whose change begins with that."""
    changed = {name: tiles for name, tiles in _changes(row).items() if name.startswith(only)}
    return {TABLE: row, **changed}


def _changes(sizes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(sizes):
        size = getattr(sizes, field.name)
        if field.name in _KEPT:
            continue
        if is_dataclass(size):
            inner = _changes(size)
            if field.name.startswith("grad_"):
                # the weight gradients' kernel has no persistent programs
                inner = {name: part for name, part in inner.items() if not name.startswith("persistent")}
            found |= {f"{field.name}.{name}": replace(sizes, **{field.name: part}) for name, part in inner.items()}
        else:
            near = _neighbours(field.name, size)
            found |= {f"{field.name}={value}": replace(sizes, **{field.name: value}) for value in near}
    return found


def _neighbours(name: str, size: int) -> list[int]:
    if isinstance(size, bool):
        return [not size]
    if name.endswith("pieces"):
        return [3 - size]
    if name.endswith("stages"):
        return [stages for stages in (size - 1, size + 1) if stages]
    if name == "persistent":
        return [programs for programs in (size - 1, size + 1) if programs >= 0]
    if name.endswith("warps"):
        return [warps for warps in (size // 2, size * 2) if 2 <= warps <= 8]
    least = 1 if name.endswith("splits") else _LEAST_BLOCK
    return [block for block in (size // 2, size * 2) if block >= least]
