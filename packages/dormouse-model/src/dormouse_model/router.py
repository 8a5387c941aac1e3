"""The router: which experts a byte goes to, with what weights, and how evenly they are used.

Letters: `T` bytes, `d` model, `E` experts, `k` experts a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dormouse_model.config import ExpertsSection


@dataclass(frozen=True)
class Choice:
    """`top_k_index` [T, k] int64, most probable first; `top_k_weights` [T, k] and `probabilities` [T, E], both fp32."""

    top_k_index: Tensor
    top_k_weights: Tensor
    probabilities: Tensor


class Router(nn.Module):
    """`softmax(W x)` over all experts, the k largest of it. fp32 outside autocast; ties go to the lowest index."""

    def __init__(self, d_model: int, config: ExpertsSection, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.normalizes = config.normalizes
        self.scaling = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, d_model, device=device))

    def forward(self, hidden_states: Tensor) -> Choice:
        """Route `hidden_states` [T, d]. Autocast rounds both operands to its dtype; sums are fp32 at least."""
        weight, device = self.weight, hidden_states.device.type
        if torch.is_autocast_enabled(device):
            # The product of two bf16 numbers is exact in fp32, and in TF32.
            low = torch.get_autocast_dtype(device)
            hidden_states, weight = (t.to(low).float() for t in (hidden_states, weight))
        with torch.autocast(device, enabled=False):
            logits = F.linear(hidden_states, weight)
            index = lowest_index_top_k(logits.detach(), self.top_k)
            probabilities = logits.softmax(-1)
            weights = probabilities.gather(-1, index)
            if self.normalizes:
                weights = weights / weights.sum(-1, keepdim=True)
            return Choice(index, weights * self.scaling, probabilities)


def lowest_index_top_k(scores: Tensor, k: int) -> Tensor:
    """Indices [T, k] of the k largest of `scores` [T, E], largest first, equal ones in order of index, on every device.

    `torch.topk` promises no order among ties; `argmax` returns the first of them.
    """
    remaining = scores.clone()
    picks = []
    for _ in range(k):
        pick = remaining.argmax(-1, keepdim=True)
        remaining.scatter_(-1, pick, -torch.inf)
        picks.append(pick)
    return torch.cat(picks, -1)


def balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """`E * sum_e f_e P_e`: 1 where experts are used evenly, E where one takes all with certainty.

    `probabilities` [T, E] is one softmax over all experts, P its mean over bytes; `counts` [E] the routed rows, f their
    share of all T*k rows. Source: Switch Transformer (arXiv 2101.03961), with T*k for T.
    """
    counts = counts.to(probabilities.dtype)
    return probabilities.shape[-1] * torch.dot(probabilities.mean(0), counts / counts.sum().clamp(min=1))
