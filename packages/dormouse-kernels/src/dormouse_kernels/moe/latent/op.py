"""The latent expert pass over its launches, its gradients of data and of weights also callable apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from dormouse_kernels.launch import dependent_launches
from dormouse_kernels.moe.latent import launches
from dormouse_kernels.moe.latent.plan import Plan, plan_for
from dormouse_kernels.moe.latent.tiles import Tiles, tiles_on
from dormouse_kernels.moe.passes import Gradients, Operands
from dormouse_kernels.moe.routing import Routing


@dataclass(frozen=True, eq=False)
class Saved:
    """A forward's arguments and what it kept: all that a backward needs."""

    x: torch.Tensor
    gate_up: torch.Tensor
    scale: torch.Tensor
    v: torch.Tensor
    weights: torch.Tensor
    latents: launches.Latents
    plan: Plan


@dataclass(frozen=True, eq=False)
class WeightGradients:
    """Gradients of gate_up_proj, scale and v, each in its argument's shape and dtype."""

    gate_up: torch.Tensor
    scale: torch.Tensor
    v: torch.Tensor


def data_gradients(saved: Saved, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, launches.Stash]:
    """(d hidden_states [T, d], d top_k_weights [T, k], stash) from dout [T, f_pad]; no weight gradient is made."""
    dweights, stash = _grad_v(saved, dout, data=True, dv=None)
    dx = launches.grad_u(saved.x, stash, saved.gate_up, saved.plan, data=True, du=None, dscale=None)
    assert dx is not None
    return dx, dweights, stash


def weight_gradients(
    saved: Saved, dout: torch.Tensor, stash: launches.Stash, *, into: WeightGradients | None = None
) -> WeightGradients:
    """Gradients of banks and scales, written once into fresh memory, or added to `into` in fp32 and rounded once."""
    grads = into or _empty_gradients(saved)
    _grad_v(saved, dout, data=False, dv=grads.v, accumulate=into is not None)
    launches.grad_u(
        saved.x, stash, saved.gate_up, saved.plan, data=False, du=grads.gate_up, dscale=grads.scale,
        accumulate=into is not None,
    )  # fmt: skip
    return grads


def _grad_v(
    saved: Saved, dout: torch.Tensor, *, data: bool, dv: torch.Tensor | None, accumulate: bool = False
) -> tuple[torch.Tensor, launches.Stash]:
    return launches.grad_v(
        dout, saved.latents, saved.scale, saved.v, saved.weights, saved.plan, data=data, dv=dv, accumulate=accumulate
    )


def _empty_gradients(saved: Saved) -> WeightGradients:
    return WeightGradients(torch.empty_like(saved.gate_up), torch.empty_like(saved.scale), torch.empty_like(saved.v))


@dataclass(frozen=True)
class LatentPass:
    """`residual + Σ_j w_j V_e (silu(U_e x · s_e) · (U'_e x · s'_e))` in Triton. Keeps z and [p, q]: 13 MB at b1."""

    plan: Plan
    dtype: torch.dtype

    @classmethod
    def over(cls, routing: Routing, dtype: torch.dtype, rank: int, tiles: Tiles | None = None) -> Self:
        """The pass over a routing, with the tiles of its device unless others are given."""
        device = routing.order.device
        tiles = tiles or tiles_on(device, dtype, rank)
        # given tiles may be another card's
        tiles = replace(tiles, pdl=tiles.pdl and dependent_launches(device))
        return cls(plan_for(routing, tiles), dtype)

    def forward(self, operands: Operands) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The result [T, f_pad], and z and [p, q]."""
        residual = None if operands.residual is None else operands.residual.contiguous()
        out, latents = launches.run_forward(
            _rows(operands.hidden_states), operands.gate_up_proj, _scale(operands), operands.down,
            operands.top_k_weights.contiguous(), residual, self.plan, self.dtype,
        )  # fmt: skip
        return out, [latents.z, latents.pq]

    def backward(
        self, operands: Operands, saved: list[torch.Tensor], grad: torch.Tensor, wanted: tuple[bool, ...]
    ) -> Gradients:
        """One pass over the gradient and V, one over x and U."""
        x, weights = _rows(operands.hidden_states), operands.top_k_weights.contiguous()
        call = Saved(
            x, operands.gate_up_proj, _scale(operands), operands.down, weights, launches.Latents(*saved), self.plan
        )
        need_x, need_u, need_s, need_v, need_w = wanted[:5]
        inner = need_x or need_u or need_s or need_w
        dx = dweights = du = dscale = None
        dv = torch.empty_like(call.v) if need_v else None
        if inner or need_v:
            dweights, stash = _grad_v(call, grad.contiguous(), data=inner, dv=dv)
        if need_u or need_s:
            du, dscale = torch.empty_like(call.gate_up), torch.empty_like(call.scale)
        if need_x or need_u or need_s:
            dx = launches.grad_u(x, stash, call.gate_up, self.plan, data=need_x, du=du, dscale=dscale)
        return dx, du, dscale, dv, dweights if need_w else None


def _scale(operands: Operands) -> torch.Tensor:
    assert operands.scale is not None
    return operands.scale


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
