"""The control of the two-latent experts: SwiGLU experts, each with a down projection of its own.

    y = sum_j w_j D_j ( silu(G_j x) * (U_j x) ) + D ( silu(G x) * (U x) )      the last term is the shared expert

Widths are such that the model has as many parameters as with two-latent experts, as nearly as a whole width allows.
Letters: `T` bytes, `d` model, `E` experts, `I` width of an expert, `S` width of the shared expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from dormouse_kernels import glu_experts, route
from torch import Tensor, nn

from dormouse_model.config import ExpertsSection
from dormouse_model.router import Router, balance_loss


class SwiGLU(nn.Module):
    """Weights of `experts` SwiGLU networks, or of one without a leading dimension where `experts` is None."""

    def __init__(
        self, experts: int | None, width: int, d_model: int, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        lead = () if experts is None else (experts,)
        self.gate_up_proj = nn.Parameter(torch.empty(*lead, 2 * width, d_model, device=device))
        self.down_proj = nn.Parameter(torch.empty(*lead, d_model, width, device=device))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[T, d]` to `[T, d]` through the one network."""
        gate, up = F.linear(hidden_states, self.gate_up_proj).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down_proj)


class SwiGLUExperts(nn.Module):
    """Router, routed SwiGLU experts and the shared one; called as `Experts` is."""

    def __init__(self, d_model: int, config: ExpertsSection, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        width, shared_width = config.swiglu_widths(d_model)
        self.num_experts = config.num_experts
        self.capacity = config.capacity
        self.implementation = config.implementation
        self.router = Router(d_model, config, device=device)
        self.swiglu = SwiGLU(config.num_experts, width, d_model, device=device)
        self.shared_swiglu = SwiGLU(None, shared_width, d_model, device=device)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[T, d]` to (`[T, d]`, the balance loss `[]`, rows an expert got `[E]` int64)."""
        choice = self.router(hidden_states)
        routing = route(choice.top_k_index, self.num_experts)
        routed = glu_experts(
            hidden_states,
            self.swiglu.gate_up_proj,
            self.swiglu.down_proj,
            choice.top_k_index,
            choice.top_k_weights,
            routing=routing,
            capacity=self.capacity,
            implementation=self.implementation,
        )
        loss = balance_loss(choice.probabilities, routing.counts)
        return routed + self.shared_swiglu(hidden_states), loss, routing.counts
