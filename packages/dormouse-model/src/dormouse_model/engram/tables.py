"""Reading rows of a table, whose gradient may be of the rows that were read and of no others.

Letters: `R` rows of width `D`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dormouse_model.engram.ngrams import NONE


def read_rows(table: Tensor, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """`table[index]`, zeros where `index` is `NONE`: [R, D] and int64 [...] to [..., D].

    With `sparse_grad` the gradient of `table` is a sparse COO tensor of the rows read, not coalesced, without those of
    `NONE`; otherwise it is dense, of the same sums. Sums are ordered: the same bits every time. Saved for the backward:
    `index`. The backward reads the device, for how many rows were read.
    """
    return _ReadRows.apply(table, index, sparse_grad)


class _ReadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, sparse_grad: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.sparse_grad = table.shape, sparse_grad
        rows = table.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, table.shape[1])
        return rows.masked_fill_((index == NONE).unsqueeze(-1), 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        read = index != NONE
        rows = index[read].unsqueeze(0)
        sparse = torch.sparse_coo_tensor(rows, gradient[read], ctx.shape, check_invariants=False)
        return sparse if ctx.sparse_grad else sparse.coalesce().to_dense(), None, None
