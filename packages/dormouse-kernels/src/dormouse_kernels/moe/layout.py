"""How rows grouped by expert lie in memory: the few operations that an expert pass is made of.

Letters: T tokens, k choices a token, R = T·k rows, E experts; `rows` is a layout's own buffer of rows, last
dimension the features. A dead row is one that belongs to no expert: its index was a sentinel, or it is over capacity.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Layout(Protocol):
    """Rows grouped by expert; made from a `Routing` for one pass."""

    compute: torch.dtype
    """Operand dtype of the matrix products."""
    accumulate: torch.dtype
    """fp64 for fp64 operands, otherwise fp32: dtype of everything that is not a matrix product."""

    def dispatch(self, x: torch.Tensor) -> torch.Tensor:
        """[T, n] -> rows [.., n] in `compute`: each row its token's."""
        ...

    def mm(self, rows: torch.Tensor, bank: torch.Tensor) -> torch.Tensor:
        """`rows · bank_eᵀ`: rows [.., n], bank [E, m, n] -> rows [.., m]."""
        ...

    def mm_combine(self, rows: torch.Tensor, bank: torch.Tensor, width: int) -> torch.Tensor:
        """`mm`, then each token's k rows summed in the order of its slots: -> [T, width] in `accumulate`.

        width >= m; columns from m on are zero, and dead rows count as zero.
        """
        ...

    def wgrad(self, grad_rows: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Σ over an expert's rows of grad_rowᵀ · row -> [E, m, n]; zero for an expert without rows."""
        ...

    def expert_sum(self, rows: torch.Tensor) -> torch.Tensor:
        """Σ over an expert's rows, rows [.., n] -> [E, n]; zero for an expert without rows."""
        ...

    def of_expert(self, values: torch.Tensor) -> torch.Tensor:
        """[E, n] -> what broadcasts against rows [.., n]."""
        ...

    def of_slot(self, values: torch.Tensor) -> torch.Tensor:
        """[T, k] -> rows [.., 1]; zero in dead rows."""
        ...

    def to_slot(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `of_slot`: rows [..] -> [T, k]; zero for dead rows."""
        ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_slots(buffer: torch.Tensor, slots: torch.Tensor, accumulate: torch.dtype) -> torch.Tensor:
    """out[t] = Σ_j buffer[slots[t, j]], summed in the order of j: buffer [N, n], slots [T, k] -> [T, n]."""
    if buffer.dtype == accumulate and slots.numel() > 0:
        # One pass, no [T·k, n] gather: 0.74 ms where index_select + sum takes 4.0 (T 4096, k 2, n 512, two cores).
        return torch.nn.functional.embedding_bag(slots, buffer, mode="sum")
    out = torch.zeros(slots.shape[0], buffer.shape[1], dtype=accumulate, device=buffer.device)
    for j in range(slots.shape[1]):
        out += buffer.index_select(0, slots[:, j])
    return out
