"""The looped block: a controller that mixes linear attention, a memory branch and experts.

    u = RMSNorm(h + e)      ga, gm, gf = sigmoid(W_c [u, x])
    h = h + alpha ( ga KDA(u) + Memory(u, gm) + gf Experts(u) )      Memory(u, g) = (1 - memory_max g) W_m u

Letters: `B` sequences, `T` bytes, `d` model, `E` experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dormouse_model.config import ModelConfig
from dormouse_model.experts import Experts
from dormouse_model.kda import KDA
from dormouse_model.norm import RMSNorm
from dormouse_model.state import KDAState


class BlockOutput(NamedTuple):
    """`hidden` [B, T, d] after the block, `balance_loss` [], `expert_counts` [E] int64, and the next state."""

    hidden: Tensor
    balance_loss: Tensor
    expert_counts: Tensor
    state: KDAState


class Controller(nn.Module):
    """`sigmoid(W_c [u, x])`: three gates a byte, for KDA, memory and experts in this order."""

    def __init__(self, d_model: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 2 * d_model, device=device))

    def forward(self, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`u`, `x` [B, T, d] to three gates [B, T, 1]."""
        # Two products instead of a concatenation of [B, T, 2d].
        on_u, on_x = self.weight.chunk(2, -1)
        gates = torch.sigmoid(F.linear(u, on_u) + F.linear(x, on_x))
        return gates[..., 0:1], gates[..., 1:2], gates[..., 2:3]


class Memory(nn.Module):
    """`W_m u`, the dense path; `share` says how much of it is kept."""

    def __init__(self, d_model: int, memory_max: float, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.memory_max = memory_max
        self.weight = nn.Parameter(torch.empty(d_model, d_model, device=device))

    def share(self, gate: Tensor) -> Tensor:
        """`1 - memory_max gate`: whatever the gate says, the dense path keeps at least `1 - memory_max` of itself."""
        return 1 - self.memory_max * gate

    def forward(self, u: Tensor) -> Tensor:
        """`[..., d]` to `[..., d]`."""
        return F.linear(u, self.weight)


class Block(nn.Module):
    """`h + alpha ( ga KDA(u) + (1 - memory_max gm) W_m u + gf Experts(u) )`: the block that every iteration applies."""

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        width = config.model.d_model
        self.norm = RMSNorm(width, device=device)
        self.controller = Controller(width, device=device)
        self.kda = KDA(config, device=device)
        self.memory = Memory(width, config.model.memory_max, device=device)
        self.experts = Experts(width, config.experts, device=device)

    def forward(
        self, hidden: Tensor, x: Tensor, embedding: Tensor, alpha: Tensor, state: KDAState | None
    ) -> BlockOutput:
        """`hidden`, `x` [B, T, d], `embedding` [d] of this iteration, `alpha` [], `state` of this iteration or None."""
        u = self.norm(hidden + embedding)
        attention_gate, memory_gate, expert_gate = self.controller(u, x)
        attended, after = self.kda(u, state)
        experts, loss, counts = self.experts(u.flatten(0, 1))
        # alpha scales the gates [B, T, 1] rather than the sum [B, T, d].
        hidden = torch.addcmul(hidden, self.memory(u), alpha * self.memory.share(memory_gate))
        hidden = torch.addcmul(hidden, attended, alpha * attention_gate)
        hidden = torch.addcmul(hidden, experts.view_as(u), alpha * expert_gate)
        return BlockOutput(hidden, loss, counts, after)
