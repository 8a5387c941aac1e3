"""The mathematics of a gated expert pass, forward and backward, on any layout of rows.

For expert e and a row x that token t sent there with weight w:
    p = U_e x      q = U'_e x      z = silu(p·s_e) · (q·s'_e)      y_t += V_e (w·z)
The weight is folded into z, so its gradient is a dot of length r and nothing of width f is saved.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dormouse_kernels.moe.layout import Layout


class Gradients(NamedTuple):
    """Gradients of a gated expert pass, in the dtypes they were summed in; None where not wanted."""

    hidden_states: torch.Tensor | None
    gate_up_proj: torch.Tensor | None
    scale: torch.Tensor | None
    down: torch.Tensor | None
    top_k_weights: torch.Tensor | None


def forward(
    layout: Layout,
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    scale: torch.Tensor | None,
    down: torch.Tensor,
    top_k_weights: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t] = Σ_j w_j · down_e z_j [T, width] in the accumulation dtype, and the rows [p, q] for the backward."""
    pq = projections(layout, hidden_states, gate_up_proj)
    gate, up = _scaled(layout, pq, scale)
    z = torch.nn.functional.silu(gate).mul_(up).mul_(layout.of_slot(top_k_weights))
    return layout.mm_combine(z, down, width), pq


def projections(layout: Layout, hidden_states: torch.Tensor, gate_up_proj: torch.Tensor) -> torch.Tensor:
    """The rows [p, q]: all of the forward that a backward needs."""
    return layout.mm(layout.dispatch(hidden_states), gate_up_proj)


def backward(
    layout: Layout,
    grad_out: torch.Tensor,
    pq: torch.Tensor,
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    scale: torch.Tensor | None,
    down: torch.Tensor,
    top_k_weights: torch.Tensor,
    wanted: tuple[bool, ...],
) -> Gradients:
    """Every gradient of `forward` that is `wanted`, five in the order of its tensors. grad_out: [T, m], m as in down.

    z is recomputed from p and q; with σ = sigmoid(g), g = p·s, u = q·s':
    dz = w·(V_eᵀ dy)    dw = ⟨V_eᵀ dy, g·σ·u⟩    dg = dz·u·σ·(1 + g·(1 − σ))    du = dz·g·σ
    """
    grad_rows = layout.dispatch(grad_out)
    gate, up = _scaled(layout, pq, scale)
    silu = torch.nn.functional.silu(gate)
    z = silu * up
    weights = layout.of_slot(top_k_weights)
    grad_down = layout.wgrad(grad_rows, z * weights) if wanted[3] else None
    grad_z = layout.mm(grad_rows, down.mT).to(layout.accumulate)
    grad_weights = layout.to_slot((grad_z * z).sum(-1)) if wanted[4] else None
    if not any(wanted[:3]):
        return Gradients(None, None, None, grad_down, grad_weights)
    grad_z = grad_z * weights
    grad_gate = torch.ops.aten.silu_backward(grad_z * up, gate)
    grad_pq = torch.cat([grad_gate, grad_z * silu], dim=-1)
    grad_scale = None
    if scale is not None:
        grad_scale = layout.expert_sum(grad_pq * pq) if wanted[2] else None
        grad_pq *= layout.of_expert(scale)
    grad_hidden = layout.mm_combine(grad_pq, gate_up_proj.mT, gate_up_proj.shape[2]) if wanted[0] else None
    grad_gate_up = layout.wgrad(grad_pq, layout.dispatch(hidden_states)) if wanted[1] else None
    return Gradients(grad_hidden, grad_gate_up, grad_scale, grad_down, grad_weights)


def _scaled(layout: Layout, pq: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(g, u): p·s and q·s' in the accumulation dtype."""
    scaled = pq.to(layout.accumulate) if scale is None else pq * layout.of_expert(scale)
    gate, up = scaled.chunk(2, dim=-1)
    return gate, up
