"""What a call tells the current `Counters`."""

from __future__ import annotations

from dormouse_kernels import counters
from dormouse_kernels.moe.routing import Routing


def count(op: str, implementation: str, routing: Routing, capacity: int | None, reason: str) -> None:
    """Counts one call, its indices outside the experts and its rows over capacity; `reason` is a fallback's, or ""."""
    active = counters.current()
    if active is None:
        return
    site = f"moe.{op}"
    active.count(site, implementation, reason=reason)
    active.count_rows(site, "bad_index", routing.bad_indices())
    if capacity is not None:
        active.count_rows(site, "dropped", (routing.counts - capacity).clamp_(min=0).sum())
