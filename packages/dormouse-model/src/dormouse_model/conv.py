"""Causal depthwise convolution over a few bytes.

Letters: `B` sequences, `T` bytes, `D` channels, `W` taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Taps(nn.Module):
    """The weight of a depthwise convolution, `[D, 1, W]`."""

    def __init__(self, channels: int, taps: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps, device=device))


def causal_conv(x: Tensor, weight: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`y_t = sum_w weight_w x_(t-W+1+w)`, with `tail` standing before the first byte.

    `x` [B, T, D], `weight` [D, 1, W] (torch's conv1d layout), `tail` [B, W-1, D], None is zeros. Returns `y` [B, T, D]
    and the tail of what follows, a copy of the last W-1 inputs; T may be shorter than W-1.
    """
    if tail is None:
        tail = x.new_zeros(x.shape[0], weight.shape[-1] - 1, x.shape[-1])
    seen = torch.cat([tail.to(x.dtype), x], 1)
    # [B, T, D] is an image of height one in channels-last order: forward and backward take half the time of conv1d.
    image = seen.mT.unsqueeze(2)
    y = F.conv2d(image, weight.unsqueeze(2).to(x.dtype), groups=x.shape[-1])
    # A view would keep all T inputs alive for as long as the state that holds it.
    return y.squeeze(2).mT, seen[:, x.shape[1] :].clone()
