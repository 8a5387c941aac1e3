"""The looped block: a controller that mixes attention, a memory branch and experts.

    u = RMSNorm(h + e)      ga, gm, gf = sigmoid(W_c [u, x])
    h = h + alpha ( ga KDA(u) + Memory(u, gm) + gf Experts(u) )
    Memory(u, g) = share Engram(u) + (1 - share) W_m u      share = memory_max g

Letters: `B` sequences, `T` bytes, `d` model, `E` experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dormouse_model.config import ModelConfig
from dormouse_model.engram import Engram, Recall
from dormouse_model.experts import Experts
from dormouse_model.kda import KDA
from dormouse_model.norm import RMSNorm
from dormouse_model.sdpa import SDPA
from dormouse_model.state import IterationState
from dormouse_model.swiglu_experts import SwiGLUExperts


class BlockOutput(NamedTuple):
    """`hidden` [B, T, d] after the block, `balance_loss` [], `expert_counts` [E] int64, and the next state."""

    hidden: Tensor
    balance_loss: Tensor
    expert_counts: Tensor
    state: IterationState


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
    """`share Engram(u) + (1 - share) W_m u` with `share = memory_max gate`; Engram is 0 where there is none.

    Whatever the gate says, the dense path keeps at least `1 - memory_max` of itself: tables cannot starve it.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        width = config.model.d_model
        self.memory_max = config.model.memory_max
        self.weight = nn.Parameter(torch.empty(width, width, device=device))
        self.engram = Engram(width, config.engram, device=device) if config.engram.enabled else None

    def recall(self, ids: Tensor, before: Tensor | None) -> tuple[Recall | None, Tensor | None]:
        """What the tables hold for `ids` after the bytes `before`, and the last bytes of both; None without tables."""
        return (None, None) if self.engram is None else self.engram.recall(ids, before)

    def forward(
        self, u: Tensor, gate: Tensor, recall: Recall | None, tail: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """`u` [B, T, d], `gate` [B, T, 1] to (`[B, T, d]`, the next tail); `recall` and `tail` are Engram's."""
        dense, share = F.linear(u, self.weight), self.memory_max * gate
        if self.engram is None:
            return dense * (1 - share), None
        assert recall is not None
        recalled, tail = self.engram(u, recall, tail)
        return torch.addcmul(dense, share, recalled - dense), tail


class Block(nn.Module):
    """`h + alpha ( ga KDA(u) + Memory(u, gm) + gf Experts(u) )`: the block that every iteration applies."""

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        width = config.model.d_model
        self.norm = RMSNorm(width, device=device)
        self.controller = Controller(width, device=device)
        if config.model.mixer == "sdpa":
            self.sdpa = SDPA(config, device=device)
        else:
            self.kda = KDA(config, device=device)
        self.memory = Memory(config, device=device)
        kind = SwiGLUExperts if config.experts.kind == "dense" else Experts
        self.experts = kind(width, config.experts, device=device)
        self.mixer = config.model.mixer

    def forward(
        self,
        hidden: Tensor,
        x: Tensor,
        embedding: Tensor,
        alpha: Tensor,
        recall: Recall | None,
        state: IterationState | None,
    ) -> BlockOutput:
        """`hidden`, `x` [B, T, d], `embedding` [d] of this iteration, `alpha` [], what Engram recalls, the state."""
        u = self.norm(hidden + embedding)
        attention_gate, memory_gate, expert_gate = self.controller(u, x)
        attended, mixer = self.get_submodule(self.mixer)(u, None if state is None else state.mixer)
        remembered, tail = self.memory(u, memory_gate, recall, None if state is None else state.engram)
        experts, loss, counts = self.experts(u.flatten(0, 1))
        # alpha scales the gates [B, T, 1] rather than the sum [B, T, d].
        hidden = torch.addcmul(hidden, remembered, alpha)
        hidden = torch.addcmul(hidden, attended, alpha * attention_gate)
        hidden = torch.addcmul(hidden, experts.view_as(u), alpha * expert_gate)
        return BlockOutput(hidden, loss, counts, IterationState(mixer, tail))
