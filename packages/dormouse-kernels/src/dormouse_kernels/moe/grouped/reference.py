"""The grouped products in plain torch: one matrix product an expert, the definition. Reads the offsets back."""

from __future__ import annotations

from itertools import pairwise

import torch

from dormouse_kernels.moe.routing import Routing


def multiply(rows: torch.Tensor, b: torch.Tensor, routing: Routing, dtype: torch.dtype) -> torch.Tensor:
    """Sorted rows [R, K] times their experts' matrices of b [E, K, N], in `dtype`; zeros for sentinels."""
    out = rows.new_zeros(rows.shape[0], b.shape[2], dtype=dtype)
    for e, (start, stop) in enumerate(_spans(routing)):
        torch.mm(rows[start:stop].to(dtype), b[e].to(dtype), out=out[start:stop])
    return out


def wgrad(rows: torch.Tensor, grads: torch.Tensor, routing: Routing, dtype: torch.dtype) -> torch.Tensor:
    """Σ over an expert's sorted rows of rowᵀ grad, [E, K, N] in `dtype`; zeros for an expert without rows."""
    out = rows.new_empty(routing.num_experts, rows.shape[1], grads.shape[1], dtype=dtype)
    for e, (start, stop) in enumerate(_spans(routing)):
        torch.mm(rows[start:stop].to(dtype).mT, grads[start:stop].to(dtype), out=out[e])
    return out


def _spans(routing: Routing) -> list[tuple[int, int]]:
    offsets: list[int] = routing.offsets.tolist()
    return list(pairwise(offsets))
