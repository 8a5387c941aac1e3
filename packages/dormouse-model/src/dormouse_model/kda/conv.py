"""Causal depthwise convolution as a few shifted multiply-adds.

Letters: `B` sequences, `T` bytes, `D` channels, `W` taps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`y_t = sum_w weight_w x_(t-W+1+w)`, with `tail` standing before the first byte.

    `x` [B, T, D], `weight` [D, 1, W] (torch's conv1d layout), `tail` [B, W-1, D], None is zeros. Returns `y` [B, T, D]
    and the tail of what follows, the last W-1 inputs.
    """
    taps = weight.shape[-1]
    if tail is None:
        tail = x.new_zeros(x.shape[0], taps - 1, x.shape[-1])
    seen = torch.cat([tail.to(x.dtype), x], 1)
    length = x.shape[1]
    y = seen[:, :length] * weight[:, 0, 0]
    for tap in range(1, taps):
        y = torch.addcmul(y, seen[:, tap : tap + length], weight[:, 0, tap])
    return y, seen[:, length:]
