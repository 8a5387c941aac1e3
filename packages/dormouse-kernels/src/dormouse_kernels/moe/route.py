"""Routing: from the experts that each token chose to rows sorted by expert, made once and used by every pass.

Letters: T tokens, k choices a token, R = T·k rows, E experts. A flat slot is t·k + j: choice j of token t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dormouse_kernels.moe.tilemap import TileMap, tile_map


@dataclass(frozen=True, eq=False)
class Routing:
    """Rows sorted by expert. All tensors live on one device, and their shapes depend on (T, k, E) alone."""

    top_k_index: torch.Tensor
    """[T, k] as given."""
    num_experts: int
    counts: torch.Tensor
    """[E] int64: rows of each expert."""
    offsets: torch.Tensor
    """[E + 1] int64: expert e owns the sorted rows offsets[e] : offsets[e + 1]; offsets[E] rows are valid."""
    order: torch.Tensor
    """[R] int64: the flat slot of each sorted row. Stable: rows of one expert keep the order of their slots."""
    inverse: torch.Tensor
    """[R] int64: the sorted row of each flat slot."""

    @property
    def top_k(self) -> int:
        """Choices a token, k."""
        return self.top_k_index.shape[1]

    @property
    def tokens(self) -> torch.Tensor:
        """[R] int64: the token of each sorted row."""
        return self.order // max(self.top_k, 1)

    @property
    def experts(self) -> torch.Tensor:
        """[R] int64: the expert of each sorted row; E where the index was a sentinel."""
        rows = torch.arange(self.order.numel(), device=self.order.device)
        return torch.searchsorted(self.offsets[1:], rows, right=True)

    def tiles(self, rows: int) -> TileMap:
        """The rows cut into tiles of at most `rows`, each of one expert."""
        return tile_map(self, rows)

    def bad_indices(self) -> torch.Tensor:
        """[] int64: how many indices lie outside [0, E); a device scalar, nothing is read."""
        return self.order.numel() - self.offsets[-1]


def route(top_k_index: torch.Tensor, num_experts: int) -> Routing:
    """Sorts the T·k choices by expert, stably.

    `top_k_index`: [T, k] int32 or int64, any strides. An index outside [0, num_experts) is a sentinel: it sorts
    after every expert's rows, no expert sees it, and its slot contributes zero.

    No host sync, no float, no atomics on floats: the same bits every time. Errors: `TypeError` for another dtype,
    `ValueError` for another number of dimensions or for num_experts < 1.
    """
    if top_k_index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"route: top_k_index is {top_k_index.dtype}; pass int32 or int64 indices")
    if top_k_index.dim() != 2:
        raise ValueError(f"route: top_k_index has shape {tuple(top_k_index.shape)}; pass [T, k]")
    if num_experts < 1:
        raise ValueError(f"route: num_experts is {num_experts}; pass at least 1")
    with torch.no_grad():
        flat = top_k_index.reshape(-1)
        valid = (flat >= 0) & (flat < num_experts)
        key = flat.to(torch.int64).masked_fill(~valid, num_experts)
        order = torch.sort(key, stable=True).indices
        rows = torch.arange(key.numel(), device=key.device)
        # not bincount: on CUDA it reads its result's size back
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=key.device)
        counts.scatter_add_(0, key, torch.ones_like(key))
        offsets = torch.zeros_like(counts)
        torch.cumsum(counts[:-1], 0, out=offsets[1:])
        inverse = torch.zeros_like(order).scatter_(0, order, rows)
    return Routing(top_k_index, num_experts, counts[:-1], offsets, order, inverse)
