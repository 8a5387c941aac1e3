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

from dormouse_model.kda.selection import LOWEST

CHUNK = 16
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


def _below(diagonal: int, like: Tensor, value: float = 1.0) -> Tensor:
    """`value` at and below `diagonal`, [C, C]: multiplying by it takes a ninth of the time of `tril` on a CPU."""
    return torch.full((CHUNK, CHUNK), value, dtype=like.dtype, device=like.device).tril_(diagonal)


class _Rule(torch.autograd.Function):
    """Names as in `chunk`. `grown` is e^G, `keys` k e^-G, `rows` [q e^G; k e^G] one above the other, all anchored.

    With `inverse` = (1 + beta A)^-1, `values` and `weights` are inverse (beta v) and inverse (beta k e^G), so that
    `u = values - weights S`; `next = e^G_last (S + keys^T u)`. Constants ride on the small [C, C] matrices and on the
    products' own factors: a pass over a tensor of q's size costs as much as a product.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        grown = g.cumsum(-2).exp_().mul_(ANCHOR)
        keys = k / grown
        rows = torch.cat([q * grown, k * grown], -2)
        attention, similarity = (rows @ keys.mT).split(CHUNK, -2)
        attention = attention * _below(0, q, scale)
        # The solve reads what is below the diagonal alone, so `similarity` needs no mask.
        one = torch.eye(CHUNK, dtype=q.dtype, device=q.device).expand_as(similarity)
        inverse = torch.linalg.solve_triangular(similarity * beta, one, upper=False, unitriangular=True)
        mixed = inverse * beta.mT
        values, weights = mixed @ v, (mixed / ANCHOR) @ rows[..., CHUNK:, :]
        last = grown[..., -1:, :].mT
        states, update = q.new_empty(q.shape[0] + 1, *state.shape), torch.empty_like(v)
        states[0] = state
        for n in range(q.shape[0]):
            torch.baddbmm(values[n], weights[n], states[n], alpha=-1, out=update[n])
            torch.baddbmm(states[n], keys[n].mT, update[n], beta=1 / ANCHOR, out=states[n + 1]).mul_(last[n])
        output = _add_product((rows[..., :CHUNK, :] @ states[:-1]), attention, update, scale / ANCHOR)
        ctx.save_for_backward(
            q, k, v, beta, grown, keys, rows, attention, similarity, inverse, values, weights, states, update
        )
        ctx.scale = scale
        return output, states[-1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_output: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
        # Products of fp32 stay so, whether or not the caller ran backward inside its autocast region.
        with torch.autocast(d_output.device.type, enabled=False):
            return _Rule._gradients(ctx, d_output, d_state)

    @staticmethod
    def _gradients(ctx: Any, d_output: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, grown, keys, rows, attention, similarity, inverse, values, weights, states, update = (
            ctx.saved_tensors
        )
        scale = ctx.scale
        last = grown[..., -1:, :].mT
        # The scan, backwards. d_inner[n] is the gradient of S + keys^T u of chunk n.
        through_output, d_update = rows[..., :CHUNK, :].mT @ d_output, attention.mT @ d_output
        d_inner = torch.empty_like(through_output)
        for n in reversed(range(q.shape[0])):
            torch.mul(d_state, last[n], out=d_inner[n])
            d_update[n].baddbmm_(keys[n], d_inner[n])
            through = torch.add(d_inner[n], through_output[n], alpha=scale)
            d_state = through.baddbmm_(weights[n].mT, d_update[n], beta=1 / ANCHOR, alpha=-1)
        d_last = (d_inner * states[1:]).sum(-1) / last.squeeze(-1)
        before = states[:-1].mT
        # The triangular solve: X = (1 + beta A)^-1 R, so dR = (1 + beta A)^-T dX and d(beta A) = -dR X^T.
        d_values, d_weights = inverse.mT @ d_update, (inverse / -ANCHOR).mT @ (d_update @ before)
        d_system = _add_product(d_values @ values.mT, d_weights, weights.mT, 1.0, ANCHOR) * _below(-1, q, -1.0)
        d_beta = (d_values * v).sum(-1) + (d_weights * rows[..., CHUNK:, :]).sum(-1) + (d_system * similarity).sum(-1)
        d_v, d_grown_keys = d_values.mul_(beta), d_weights.mul_(beta)
        # The scores.
        d_attention, d_similarity = (d_output @ update.mT) * _below(0, q, scale), d_system * beta
        d_scores = torch.cat([d_attention, d_similarity], -2)
        d_q = _add_product(d_output @ before, d_attention, keys, scale / ANCHOR).mul_(grown)
        d_up = _add_product(d_grown_keys, d_similarity, keys, 1.0).mul_(grown)
        d_down = _add_product(update @ d_inner.mT, d_scores.mT, rows, 1.0).div_(grown)
        d_total = torch.addcmul(d_q * q, d_up - d_down, k)
        d_total[..., -1, :] += d_last
        # g_t reaches every G from t on.
        d_g = _below(0, q).mT @ d_total
        return d_q, d_up.add_(d_down), d_v, d_g, d_beta.unsqueeze(-1), d_state, None


def _add_product(base: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """`beta base + alpha left right` written over `base`, all `[N, X, ., .]`."""
    base.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1), beta=beta, alpha=alpha)
    return base
