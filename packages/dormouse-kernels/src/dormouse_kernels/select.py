"""`explain`: which implementation an op would run on a shape, and why, without running it."""

from __future__ import annotations

import torch

from dormouse_kernels.moe import selection
from dormouse_kernels.moe.selection import Choice

OPS: tuple[str, ...] = ("latent_glu_experts", "glu_experts")


def explain(
    op_name: str,
    *,
    T: int,
    k: int,
    num_experts: int,
    d: int,
    r: int,
    f: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    implementation: str = selection.AUTO,
) -> Choice:
    """`Choice(implementation, reason, considered)` for a call of `op_name` on this shape: what the op itself asks.

    T tokens, k choices a token, hidden width d, latent width r (I for `glu_experts`), output width f (D for
    `glu_experts`). Errors: `ValueError` for an unknown op or implementation, with the list.
    """
    if op_name not in OPS:
        raise ValueError(f"explain: op_name is {op_name!r}; pass one of {', '.join(OPS)}")
    return selection.choose(
        op_name,
        implementation=implementation,
        T=T,
        k=k,
        num_experts=num_experts,
        d=d,
        r=r,
        f=f,
        dtype=dtype,
        device=torch.device(device).type,
    )
