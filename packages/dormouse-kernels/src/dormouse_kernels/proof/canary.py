"""Out-of-bounds reads made visible: the interpreter and the GPU both return whatever lies beside a buffer."""

from __future__ import annotations

import torch


def surrounded(tensor: torch.Tensor, margin: int = 256) -> torch.Tensor:
    """A contiguous copy of a float tensor with `margin` NaNs before and after it in the same storage.

    A read past either end gives NaN instead of a value that happens to be right. margin is a multiple of 16, so the
    copy is as aligned as a fresh tensor. Errors: `ValueError` for another margin, `TypeError` for integers.
    """
    if not tensor.is_floating_point():
        raise TypeError(f"surrounded: tensor is {tensor.dtype}; pass floats, integers have no NaN")
    if margin % 16:
        raise ValueError(f"surrounded: margin is {margin}; pass a multiple of 16")
    size = tensor.numel()
    parent = torch.full((size + 2 * margin,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    inside = parent[margin : margin + size].view(tensor.shape)
    return inside.copy_(tensor)
