"""Reading rows of a table whose gradient holds the rows that were read, and no others.

Letters: `R` rows of width `D`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dormouse_model.engram.ngrams import NONE


def read_rows(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]`, zeros where `index` is `NONE`: [R, D] and int64 [...] to [..., D].

    The gradient of `table` is a sparse COO tensor of the rows read, not coalesced; a place that read `NONE` is not in
    it. Saved for the backward: `index`. The backward reads the device, for how many rows that leaves.
    """
    return _ReadRows.apply(table, index)


class _ReadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = table.shape
        rows = table.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, table.shape[1])
        return rows.masked_fill_((index == NONE).unsqueeze(-1), 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        read = index != NONE
        return torch.sparse_coo_tensor(
            index[read].unsqueeze(0), gradient[read], ctx.shape, check_invariants=False
        ), None
