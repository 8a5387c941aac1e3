"""The delta rule one byte after another: the definition, the fp64 oracle of the tests, and the decode step.

Letters: `B` sequences, `T` bytes, `H` heads, `K` size of a key and of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """`S = e^g S;  u = beta (v - k S);  S = S + k u;  o = scale q S`, for one byte of each sequence.

    `q`, `k`, `v`, `g` [B, H, K], `beta` [B, H], `state` [B, H, K, K] (keys by values). Returns `o` [B, H, K] and the
    new state.
    """
    state = state * g.exp().unsqueeze(-1)
    update = beta.unsqueeze(-1) * (v - (k.unsqueeze(-2) @ state).squeeze(-2))
    state = state + k.unsqueeze(-1) * update.unsqueeze(-2)
    return scale * (q.unsqueeze(-2) @ state).squeeze(-2), state


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`step` for t = 0 ... T-1, differentiable, in the dtype it is given (fp64 makes it the oracle).

    `q`, `k` normalised, `v` [B, T, H, K]; `g` [B, T, H, K] log decay, at most 0; `beta` [B, T, H]. Returns `o`
    [B, T, H, K] and the final state [B, H, K, K]; `initial_state` None is zeros.
    """
    batch, _, heads, size = q.shape
    state = q.new_zeros(batch, heads, size, v.shape[-1]) if initial_state is None else initial_state
    outputs = []
    for t in range(q.shape[1]):
        output, state = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state, scale)
        outputs.append(output)
    return torch.stack(outputs, 1) if outputs else torch.empty_like(v), state
