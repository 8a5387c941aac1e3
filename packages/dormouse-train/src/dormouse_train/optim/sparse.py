"""Adam on the rows of a table that a step read: the others keep their values and their moments, bit for bit.

Letters: `R` rows of width `D`, `N` rows touched.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def sparse_adam_(
    table: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    updates: Tensor,
    *,
    rate: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """`m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  w -= rate * m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps)`, in place.

    `table`, `exp_avg`, `exp_avg_sq` [R, D]; `grad` sparse COO of that shape, whose equal rows are summed first, so that
    a row moves once however often it was read; `updates` [], this call included in t afterwards, counts the table's
    updates and not a row's. No decay. Sorting decides the order of every sum: the same bits each run.
    Source: Adam (arXiv 1412.6980) without the rows that have no gradient, as `torch.optim.SparseAdam`.
    """
    grad = grad.coalesce()
    rows, values = grad.indices()[0], grad.values()
    updates += 1
    mean = exp_avg.index_select(0, rows).lerp_(values, 1 - betas[0])
    square = exp_avg_sq.index_select(0, rows).mul_(betas[1]).addcmul_(values, values, value=1 - betas[1])
    exp_avg.index_copy_(0, rows, mean)
    exp_avg_sq.index_copy_(0, rows, square)
    root = (square / (1 - betas[1] ** updates)).sqrt_().add_(eps)
    moved = mean.div_(root).mul_(rate / (1 - betas[0] ** updates))
    table.index_copy_(0, rows, table.index_select(0, rows).sub_(moved))
