"""Normalisation over the last dimension: root mean square, and unit length.

Both have a backward by hand: on a CPU autograd through the formula takes three times as long.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RMS_EPS = 1e-5
UNIT_EPS = 1e-6


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + 1e-5) * weight` over the last dimension of size `size`, in fp32 at least."""

    def __init__(self, size: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]`, returned in x's dtype."""
        wide = x if x.dtype.itemsize >= 4 else x.float()
        if x.is_cuda:  # one kernel there
            return F.rms_norm(wide, self.weight.shape, self.weight, RMS_EPS).to(x.dtype)
        return _RMS.apply(wide, self.weight).to(x.dtype)


def unit(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last dimension: zero stays zero, with a finite gradient."""
    return _Unit.apply(x)


class _RMS(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse = squares.div_(x.shape[-1]).add_(RMS_EPS).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, inverse = ctx.saved_tensors
        size = x.shape[-1]
        with torch.autocast(x.device.type, enabled=False):
            products = (gradient * x).reshape(-1, size)
            along = (products @ weight).view_as(inverse)
            d_x = (gradient * weight).mul_(inverse).addcmul_(x, along * inverse.pow(3), value=-1 / size)
            return d_x, inverse.reshape(-1) @ products


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(UNIT_EPS).rsqrt_()
        y = x * inverse
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        y, inverse = ctx.saved_tensors
        along = torch.linalg.vecdot(gradient, y).unsqueeze(-1)
        return (gradient * inverse).addcmul_(y, along * inverse, value=-1)
