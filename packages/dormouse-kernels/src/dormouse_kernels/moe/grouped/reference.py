"""The grouped products in plain torch: one matrix product an expert, the definition. Reads the offsets back."""

from __future__ import annotations

from itertools import pairwise

import torch

from dormouse_kernels.moe.layout import accumulation_dtype
from dormouse_kernels.moe.routing import Routing


def multiply(a: torch.Tensor, b: torch.Tensor, routing: Routing, *, gather: bool, scatter: bool) -> torch.Tensor:
    """[R, N] in the operands' wider dtype; autograd differentiates it."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    compute = accumulation_dtype(dtype)
    rows = (a.index_select(0, routing.tokens) if gather else a).to(compute)
    parts = [rows[start:stop] @ b[e].to(compute) for e, (start, stop) in enumerate(_spans(routing))]
    valid = sum(part.shape[0] for part in parts)
    out = torch.cat([*parts, rows.new_zeros(rows.shape[0] - valid, b.shape[2])]).to(dtype)
    return out.index_select(0, routing.inverse) if scatter else out


def wgrad(a: torch.Tensor, g: torch.Tensor, routing: Routing, *, gather: bool, scatter: bool) -> torch.Tensor:
    """[E, K, N] in the accumulation dtype; autograd differentiates it."""
    compute = accumulation_dtype(torch.promote_types(a.dtype, g.dtype))
    rows = (a.index_select(0, routing.tokens) if gather else a).to(compute)
    grads = (g.index_select(0, routing.order) if scatter else g).to(compute)
    return torch.stack([rows[start:stop].mT @ grads[start:stop] for start, stop in _spans(routing)])


def _spans(routing: Routing) -> list[tuple[int, int]]:
    offsets: list[int] = routing.offsets.tolist()
    return list(pairwise(offsets))
