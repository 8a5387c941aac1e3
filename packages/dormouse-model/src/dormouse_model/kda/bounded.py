"""The chunked delta rule where every log decay is known to be at least -5: no [C, C, K] tensor, a backward by hand.

The formulas are those of `chunk`. Sixteen decays of -5 or more span `e^80`, which fp32 holds, so `e^(G_i - G_j)` may
be split into `e^(G_i)` and `e^(-G_j)` and the scores become matrix products. The split is anchored on a constant, e^40,
and never on a byte: with an anchor inside the chunk, rounding would let later bytes reach earlier ones.

Letters: `B` sequences, `T` bytes, `H` heads of size `K`, `N` chunks of `C` bytes, `X = B H`. Everything inside is
`[N, X, C, K]`, so that one chunk of all sequences is contiguous.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 16
LOWEST = -5.0
"""The lowest log decay of a byte that the split stands; at -5.9 masked scores overflow."""
ANCHOR = math.exp(-LOWEST * CHUNK / 2)


def bounded_chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`chunk_delta_rule` for `g` in [-5, 0], which is not checked; equal to it up to rounding.

    Saved for the backward: about twelve tensors of q's size, three of [C, C] a chunk, and the state before each chunk.
    Nothing is recomputed. Not differentiable twice.
    """
    batch, length, heads, size = q.shape
    padding = -length % CHUNK
    q, k, v, g, beta = (_chunks(t, padding) for t in (q, k, v, g, beta.unsqueeze(-1)))
    if initial_state is None:
        state = q.new_zeros(batch * heads, size, size)
    else:
        state = initial_state.reshape(batch * heads, size, size)
    output, state = _Rule.apply(q, k, v, g, beta, state, scale)
    output = output.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4).reshape(batch, -1, heads, size)
    return output[:, :length], state.view(batch, heads, size, size)


def _chunks(x: Tensor, padding: int) -> Tensor:
    """[B, T, H, K] to [N, B*H, C, K]; padded bytes have q = k = v = g = beta = 0 and leave the state alone."""
    if padding:
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
    return x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def _below(diagonal: int, like: Tensor) -> Tensor:
    """Ones at and below `diagonal`, [C, C]: multiplying by it takes a ninth of the time of `tril` on a CPU."""
    return torch.ones(CHUNK, CHUNK, dtype=like.dtype, device=like.device).tril(diagonal)


class _Rule(torch.autograd.Function):
    """Names as in `chunk`: `grown` e^G, `keys` k e^-G, `rows` [q e^G; k e^G] one above the other, both anchored."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        size = v.shape[-1]
        grown = g.cumsum(-2).exp_().mul_(ANCHOR)
        keys = k / grown
        rows = torch.cat([q * (grown * scale), k * grown], -2)
        attention, similarity = (rows @ keys.mT).split(CHUNK, -2)
        attention, similarity = attention * _below(0, q), similarity * _below(-1, q)
        one = torch.eye(CHUNK, dtype=q.dtype, device=q.device).expand_as(similarity)
        inverse = torch.linalg.solve_triangular(similarity * beta, one, upper=False, unitriangular=True)
        solved = inverse @ (torch.cat([v, rows[..., CHUNK:, :]], -1) * beta)
        values, weights = solved[..., :size], solved[..., size:] / ANCHOR
        last = grown[..., -1:, :]
        carried, decay = keys * last, (last / ANCHOR).mT
        before, updates = [], []
        for n in range(q.shape[0]):
            before.append(state)
            updates.append(torch.baddbmm(values[n], weights[n], state, alpha=-1))
            state = torch.baddbmm(state * decay[n], carried[n].mT, updates[n])
        states, update = torch.stack(before), torch.stack(updates)
        output = attention @ update + (rows[..., :CHUNK, :] @ states) / ANCHOR
        ctx.save_for_backward(
            q, k, v, beta, grown, keys, rows, attention, similarity, inverse, solved, weights, carried, states, update
        )
        ctx.scale = scale
        return output, state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_output: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, beta, grown, keys, rows, attention, similarity, inverse, solved, weights, carried, states, update) = (
            ctx.saved_tensors
        )
        size = v.shape[-1]
        queries = rows[..., :CHUNK, :]
        decay = (grown[..., -1:, :] / ANCHOR).mT
        # The scan, backwards: after it d_states[n] is the gradient of the state after chunk n.
        through_output = (queries.mT @ d_output) / ANCHOR
        from_output = attention.mT @ d_output
        after, d_updates = [], []
        for n in reversed(range(q.shape[0])):
            after.append(d_state)
            d_updates.append(torch.baddbmm(from_output[n], carried[n], d_state))
            d_state = torch.baddbmm(
                torch.addcmul(through_output[n], d_state, decay[n]), weights[n].mT, d_updates[-1], alpha=-1
            )
        d_states, d_update = torch.stack(after[::-1]), torch.stack(d_updates[::-1])
        d_carried = update @ d_states.mT
        d_last = (d_carried * carried).sum(-2) + (d_states * states).sum(-1) * decay.squeeze(-1)
        # The triangular solve: X = (1 + beta A)^-1 R, so dR = (1 + beta A)^-T dX and d(beta A) = -dR X^T.
        d_weights = (d_update @ states.mT) / -ANCHOR
        d_right = inverse.mT @ torch.cat([d_update, d_weights], -1)
        d_system = (d_right @ solved.mT) * -_below(-1, q)
        d_beta = (d_right[..., :size] * v).sum(-1) + (d_right[..., size:] * rows[..., CHUNK:, :]).sum(-1)
        d_beta = (d_beta + (d_system * similarity).sum(-1)).unsqueeze(-1)
        d_right = d_right * beta
        # The scores.
        d_attention = (d_output @ update.mT) * _below(0, q)
        d_scores = torch.cat([d_attention, d_system * beta], -2)
        d_rows = d_scores @ keys
        d_keys = d_scores.mT @ rows + d_carried * grown[..., -1:, :]
        d_queries = d_rows[..., :CHUNK, :] + (d_output @ states.mT) / ANCHOR
        d_grown_keys = d_rows[..., CHUNK:, :] + d_right[..., size:]
        d_q = d_queries * (grown * ctx.scale)
        d_up, d_down = d_grown_keys * grown, d_keys / grown
        d_total = d_q * q + (d_up - d_down) * k
        d_total[..., -1, :] += d_last
        # g_t reaches every G from t on.
        d_g = _below(0, q).mT @ d_total
        return d_q, d_up + d_down, d_right[..., :size], d_g, d_beta, d_state, None
