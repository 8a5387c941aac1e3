"""Whether two arms computed the same: a ratio of their times means something only then."""

from __future__ import annotations

from collections.abc import Iterable

import torch

ROUNDING = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}
"""Relative distance, ||a - b|| / ||b||, that another order of the same sums may make."""
_CHUNK = 1 << 25


class DisagreementError(RuntimeError):
    """Two arms computed different things: a ratio of their times would compare nothing."""


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in fp64, a chunk at a time: a bank's gradient in fp64 would not fit beside the bank."""
    if got.shape != want.shape:
        raise ValueError(f"distance: got has shape {tuple(got.shape)}, want {tuple(want.shape)}; pass equal shapes")
    apart = torch.zeros((), dtype=torch.float64, device=want.device)
    whole = torch.zeros_like(apart)
    for one, other in zip(got.reshape(-1).split(_CHUNK), want.reshape(-1).split(_CHUNK), strict=True):
        reference = other.double()
        apart += (one.double() - reference).square().sum()
        whole += reference.square().sum()
    if whole == 0:
        return 0.0 if apart == 0 else float("inf")
    return (apart / whole).sqrt().item()


def farthest(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor]) -> float:
    """The largest distance of any pair; a NaN before any number."""
    found = [distance(mine, theirs) for mine, theirs in zip(got, want, strict=True)]
    return next((far for far in found if far != far), max(found))
