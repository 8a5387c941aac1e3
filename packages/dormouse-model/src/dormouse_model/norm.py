"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-5


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + 1e-5) * weight` over the last dimension of size `size`, in fp32 at least."""

    def __init__(self, size: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]`, returned in x's dtype."""
        wide = x if x.dtype.itemsize >= 4 else x.float()
        return F.rms_norm(wide, self.weight.shape, self.weight, EPS).to(x.dtype)
