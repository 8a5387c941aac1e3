"""The delta rule sixteen bytes at a time.

Within a chunk, with `G` the running sum of the log decays and `S` the state before the chunk:

    A_ij = sum_c k_ic k_jc e^(G_ic - G_jc)  (i > j)     u_i = beta_i (v_i - (k_i e^G_i) S) - beta_i sum_j A_ij u_j
    B_ij = sum_c q_ic k_jc e^(G_ic - G_jc)  (i >= j)    o_i = (q_i e^G_i) S + sum_j B_ij u_j
    S'   = e^G_last S + sum_j (k_j e^(G_last - G_j)) u_j

Letters: `B` sequences, `T` bytes, `H` heads of size `K`, `N` chunks of `C` bytes. Source: arXiv 2510.26692, section 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 16


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`recurrent_delta_rule` for any decay, equal to it up to rounding, in the dtype it is given.

    Autograd saves several tensors of [C, C, K] a chunk: where decays are bounded, `bounded_chunk_delta_rule` is for it.
    """
    batch, length, heads, size = q.shape
    padding = -length % CHUNK
    q, k, v, g = (_chunks(t, padding) for t in (q, k, v, g))
    beta = _chunks(beta.unsqueeze(-1), padding)
    decay = _decay_between(g)
    keys = torch.einsum("bhnic,bhnjc,bhnijc->bhnij", k, k, decay).tril(-1)
    queries = torch.einsum("bhnic,bhnjc,bhnijc->bhnij", q, k, decay) * scale
    decayed = g.cumsum(-2).exp()
    right = torch.cat([v, k * decayed], -1) * beta
    solved = torch.linalg.solve_triangular(keys * beta, right, upper=False, unitriangular=True)
    value, key = solved.split([v.shape[-1], size], -1)
    carried = k * decay[..., -1, :, :]
    transition = torch.diag_embed(decayed[..., -1, :]) - carried.mT @ key
    added = carried.mT @ value
    state = q.new_zeros(batch, heads, size, v.shape[-1]) if initial_state is None else initial_state
    states = []
    for n in range(q.shape[2]):
        states.append(state)
        state = transition[:, :, n] @ state + added[:, :, n]
    before = torch.stack(states, 2)
    output = queries @ value + (q * decayed * scale - queries @ key) @ before
    return output.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length], state


def _decay_between(g: Tensor) -> Tensor:
    """`e^(G_i - G_j)` for i >= j and 0 elsewhere, [..., C, C, K] from `g` [..., C, K].

    Sums run over the bytes between j and i: the difference of two running sums of thousands has no digits left. The
    mask comes before the exponential, so that nothing masked can overflow and be NaN, as 0 * inf, in the backward.
    """
    all_pairs = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device)
    not_between, future = (all_pairs.triu(diagonal).unsqueeze(-1) for diagonal in (0, 1))
    between = g.unsqueeze(-2).masked_fill(not_between, 0.0).cumsum(-3)
    return between.masked_fill(future, -torch.inf).exp()


def _chunks(x: Tensor, padding: int) -> Tensor:
    """[B, T, H, K] to [B, H, N, C, K]; padded bytes have q = k = v = g = beta = 0 and leave the state alone."""
    if padding:
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
    return x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)
