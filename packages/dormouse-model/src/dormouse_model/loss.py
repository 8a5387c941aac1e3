"""What a byte model is trained on and measured by."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all positions of `-log softmax(logits)[target]`, in nats.

    `logits` [..., 256] floating, computed in fp32 at least; `targets` [...] uint8 or int64, the byte that follows each
    position.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"next_byte_loss: targets has shape {tuple(targets.shape)} but logits {tuple(logits.shape)}; "
            "give one target byte a position"
        )
    logits = logits if logits.dtype.itemsize >= 4 else logits.float()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long())


def bits_per_byte(nats: float) -> float:
    """`nats / ln 2`: a mean loss in nats as bits per byte."""
    return nats / math.log(2.0)


__all__ = [
    "bits_per_byte",
    "next_byte_loss",
]
