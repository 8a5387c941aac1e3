"""Split masters: the fp32 truth of an expert's factor kept as a bf16 high half, which is the bank, and 16 low bits.

Letters: `r` rank, `n` the long side of a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from dormouse_kernels import muon
from torch import Tensor, nn

Side = Literal["rows", "columns"]


@dataclass(frozen=True)
class Factor:
    """A view of one factor bank: where its master lives and along which side it is orthonormal.

    `high` bf16 Parameter and `low` int16 buffer of one shape. `side="rows"`: `[..., 2r, n]`, U's rows then those of U';
    each half has orthonormal rows. `side="columns"`: `[..., n, r]` with orthonormal columns.
    """

    name: str
    high: nn.Parameter
    low: Tensor
    side: Side

    def rows(self, tensor: Tensor) -> Tensor:
        """`tensor` of the factor's shape as a view `[..., r, n]`; U and U' apart, `[..., 2, r, n]`, for `"rows"`."""
        if self.side == "columns":
            return tensor.mT
        return tensor.unflatten(-2, (2, tensor.shape[-2] // 2))

    def unrows(self, rows: Tensor) -> Tensor:
        """The inverse of `rows`."""
        return rows.mT if self.side == "columns" else rows.flatten(-3, -2)

    def master(self) -> Tensor:
        """The exact fp32 master, a new tensor of the factor's shape."""
        if self.high.dtype != torch.bfloat16:
            raise TypeError(
                f"Factor: {self.name} is {self.high.dtype}, no longer the bf16 half of a split master; do not cast it"
            )
        return muon.join_master(self.high.detach(), self.low)

    @torch.no_grad()
    def set_master(self, master: Tensor) -> None:
        """Write an fp32 `master` of the factor's shape into both halves, in place."""
        if master.shape != self.high.shape or master.dtype != torch.float32:
            raise ValueError(
                f"Factor: master of {self.name} must be fp32 {tuple(self.high.shape)}, "
                f"got {master.dtype} {tuple(master.shape)}; use unrows() to leave the rows convention"
            )
        high, low = muon.split_master(master)
        self.high.copy_(high)
        self.low.copy_(low)
