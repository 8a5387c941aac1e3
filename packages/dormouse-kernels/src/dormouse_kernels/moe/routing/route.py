"""Routing: from the experts that each token chose to rows sorted by expert, made once and used by every pass.

Letters: T tokens, k choices a token, R = T·k rows, E experts. A flat slot is t·k + j: choice j of token t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dormouse_kernels.launch import interpreting
from dormouse_kernels.moe.routing.tilemap import TileMap, cut

AUTO = "auto"
IMPLEMENTATIONS: tuple[str, ...] = ("reference", "triton")
TRITON_MOST_EXPERTS = 4094
"""One program of the scan holds a bin an expert, one for sentinels and one for overhang: 4096 bins."""
TILE_ROWS = 64


@dataclass(frozen=True, eq=False)
class Routing:
    """Rows sorted by expert. All tensors live on one device, and their shapes depend on (T, k, E) alone."""

    top_k_index: torch.Tensor
    """[T, k] as given, not copied: it must keep its values for as long as the routing is used."""
    num_experts: int
    counts: torch.Tensor
    """[E] int64: rows of each expert."""
    offsets: torch.Tensor
    """[E + 1] int64: expert e owns the sorted rows offsets[e] : offsets[e + 1]; offsets[E] rows are valid."""
    order: torch.Tensor
    """[R] int32: the flat slot of each sorted row. Stable: rows of one expert keep the order of their slots."""
    inverse: torch.Tensor
    """[R] int32: the sorted row of each flat slot."""
    tile_map: TileMap | None
    """The rows cut into tiles, where the implementation makes them in the same launches."""

    @property
    def top_k(self) -> int:
        """Choices a token, k."""
        return self.top_k_index.shape[1]

    @property
    def tokens(self) -> torch.Tensor:
        """[R] int32: the token of each sorted row."""
        return self.order // max(self.top_k, 1)

    @property
    def experts(self) -> torch.Tensor:
        """[R] int64: the expert of each sorted row; E where the index was a sentinel."""
        rows = torch.arange(self.order.numel(), device=self.order.device)
        return torch.searchsorted(self.offsets[1:], rows, right=True)

    def bad_indices(self) -> torch.Tensor:
        """[] int64: how many indices lie outside [0, E); a device scalar, nothing is read."""
        return self.order.numel() - self.offsets[-1]

    def cut(self, rows: int) -> TileMap:
        """Tiles of at most `rows` rows: `tile_map` where it has that size, otherwise made now; no host sync."""
        if self.tile_map is not None and self.tile_map.rows == rows:
            return self.tile_map
        if choose_sort(self.order.device.type, self.num_experts) == "triton":
            from dormouse_kernels.moe.routing.sort import cut_tiles

            return cut_tiles(self.offsets, self.order.numel(), rows)
        return cut(self.counts, self.offsets, self.order.numel(), rows)


def route(
    top_k_index: torch.Tensor, num_experts: int, *, tile_rows: int = TILE_ROWS, implementation: str = AUTO
) -> Routing:
    """Sorts the T·k choices by expert, stably, for E from 1 to 65,536 and beyond.

    `top_k_index`: [T, k] int32 or int64, any strides. An index outside [0, num_experts) is a sentinel: it sorts
    after every expert's rows, no expert sees it, and its slot contributes zero. `tile_rows`: the size of the tiles
    that "triton" cuts in the same three launches, 64 being what `latent_glu_experts` reads.

    `implementation`: "triton" needs a CUDA device and at most 4094 experts, "reference" is torch's stable sort;
    "auto" is the first where it can run. No host sync, no float, no atomics on floats: the same bits every time.
    Errors: `TypeError` for another dtype, `ValueError` for another number of dimensions, for num_experts < 1,
    tile_rows < 1 or an implementation that is unknown or cannot run.
    """
    if top_k_index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"route: top_k_index is {top_k_index.dtype}; pass int32 or int64 indices")
    if top_k_index.dim() != 2:
        raise ValueError(f"route: top_k_index has shape {tuple(top_k_index.shape)}; pass [T, k]")
    if num_experts < 1:
        raise ValueError(f"route: num_experts is {num_experts}; pass at least 1")
    if tile_rows < 1:
        raise ValueError(f"route: tile_rows is {tile_rows}; pass at least 1")
    if choose_sort(top_k_index.device.type, num_experts, implementation) == "triton":
        # here and in `cut`, because a plain `import dormouse_kernels` must not wait for triton
        from dormouse_kernels.moe.routing.sort import sort_slots

        if torch.compiler.is_compiling():
            from dormouse_kernels.moe import library

            return library.unpack(top_k_index, library.sort(top_k_index, num_experts, tile_rows), tile_rows)
        return sort_slots(top_k_index, num_experts, tile_rows)
    return _reference(top_k_index, num_experts)


def choose_sort(device: str, num_experts: int, implementation: str = AUTO) -> str:
    """Which implementation of `route` runs. Errors: `ValueError` for "triton" by name where it cannot."""
    if implementation not in (AUTO, *IMPLEMENTATIONS):
        known = ", ".join((AUTO, *IMPLEMENTATIONS))
        raise ValueError(f"route: implementation is {implementation!r}; pass one of {known}")
    if implementation == "reference":
        return implementation
    fits = num_experts <= TRITON_MOST_EXPERTS
    if implementation == AUTO:
        return "triton" if fits and device == "cuda" else "reference"
    if not fits:
        raise ValueError(
            f"route: num_experts is {num_experts} and implementation='triton' takes up to {TRITON_MOST_EXPERTS}; "
            "pass implementation='reference'"
        )
    if device != "cuda" and not (device in ("cpu", "meta") and interpreting()):
        raise ValueError(
            f"route: top_k_index is on {device} and implementation='triton' needs a CUDA device; "
            "pass implementation='reference'"
        )
    return implementation


def _reference(top_k_index: torch.Tensor, num_experts: int) -> Routing:
    with torch.no_grad():
        flat = top_k_index.reshape(-1)
        valid = (flat >= 0) & (flat < num_experts)
        key = flat.to(torch.int64).masked_fill(~valid, num_experts)
        order = torch.sort(key, stable=True).indices
        rows = torch.arange(key.numel(), dtype=torch.int32, device=key.device)
        # not bincount: on CUDA it reads its result's size back
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=key.device)
        counts.scatter_add_(0, key, torch.ones_like(key))
        offsets = torch.zeros_like(counts)
        torch.cumsum(counts[:-1], 0, out=offsets[1:])
        inverse = torch.zeros_like(rows).scatter_(0, order, rows)
        order = order.to(torch.int32)
    return Routing(top_k_index, num_experts, counts[:-1], offsets, order, inverse, None)
