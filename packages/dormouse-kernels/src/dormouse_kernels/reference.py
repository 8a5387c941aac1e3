"""The expert passes on the `reference` implementation: one matrix product an expert, the definition."""

from __future__ import annotations

import torch

from dormouse_kernels.moe import op
from dormouse_kernels.moe.routing import Routing


def latent_glu_experts(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    scale: torch.Tensor,
    v: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    routing: Routing | None = None,
    residual: torch.Tensor | None = None,
    capacity: int | None = None,
    check_indices: bool = False,
) -> torch.Tensor:
    """`dormouse_kernels.latent_glu_experts` with `implementation="reference"`: the same arguments and errors."""
    return op.latent_glu_experts(
        hidden_states, gate_up_proj, scale, v, top_k_index, top_k_weights,
        routing=routing, residual=residual, capacity=capacity, check_indices=check_indices, implementation="reference",
    )  # fmt: skip


def glu_experts(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    routing: Routing | None = None,
    capacity: int | None = None,
    check_indices: bool = False,
) -> torch.Tensor:
    """`dormouse_kernels.glu_experts` with `implementation="reference"`: the same arguments and errors."""
    return op.glu_experts(
        hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights,
        routing=routing, capacity=capacity, check_indices=check_indices, implementation="reference",
    )  # fmt: skip
