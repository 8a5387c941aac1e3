"""The latent expert pass as one autograd function, its gradients of data and of weights also callable apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dormouse_kernels.moe.latent import launches
from dormouse_kernels.moe.latent.plan import Plan


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


class LatentExperts(torch.autograd.Function):
    """`residual + Σ_j w_j V_e (silu(U_e x · s_e) · (U'_e x · s'_e))`. Saves its arguments, z and [p, q]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        scale: torch.Tensor,
        v: torch.Tensor,
        weights: torch.Tensor,
        residual: torch.Tensor | None,
        plan: Plan,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        x, weights = _rows(x), weights.contiguous()
        residual_dtype = None if residual is None else residual.dtype
        residual = None if residual is None else residual.contiguous()
        out, latents = launches.run_forward(x, gate_up, scale, v, weights, residual, plan, dtype)
        ctx.save_for_backward(x, gate_up, scale, v, weights, latents.z, latents.pq)
        ctx.plan, ctx.residual_dtype, ctx.f = plan, residual_dtype, v.shape[1]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate_up, scale, v, weights, z, pq = ctx.saved_tensors
        saved = Saved(x, gate_up, scale, v, weights, launches.Latents(z, pq), ctx.plan)
        need_x, need_u, need_s, need_v, need_w, need_residual = ctx.needs_input_grad[:6]
        dout = dout.contiguous()
        dx = dweights = du = dscale = None
        dv = torch.empty_like(v) if need_v else None
        inner = need_x or need_u or need_s or need_w
        if inner or need_v:
            dweights, stash = _grad_v(saved, dout, data=inner, dv=dv)
        if need_u or need_s:
            du, dscale = torch.empty_like(gate_up), torch.empty_like(scale)
        if need_x or need_u or need_s:
            dx = launches.grad_u(x, stash, gate_up, ctx.plan, data=need_x, du=du, dscale=dscale)
        dresidual = _residual_gradient(dout, ctx.residual_dtype, ctx.f) if need_residual else None
        return dx, du, dscale, dv, dweights if need_w else None, dresidual, None, None


def _residual_gradient(dout: torch.Tensor, dtype: torch.dtype, f: int) -> torch.Tensor:
    grad = dout.to(dtype)
    if f < dout.shape[1]:
        # the pad columns reach no output: the reference gives them zeros too
        grad = torch.nn.functional.pad(grad[:, :f], (0, dout.shape[1] - f))
    return grad


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def latent_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    scale: torch.Tensor,
    v: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None,
    plan: Plan,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The pass over checked arguments, [T, f_pad] in `dtype`."""
    return LatentExperts.apply(x, gate_up, scale, v, weights, residual, plan, dtype)
