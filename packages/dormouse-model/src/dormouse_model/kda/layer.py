"""The KDA layer: projections, short convolutions, the gated delta rule, and a gated norm a head.

Letters: `B` sequences, `T` bytes, `d` model, `H` heads of size `K`, `W` taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dormouse_model.config import ModelConfig
from dormouse_model.conv import Taps, causal_conv
from dormouse_model.kda.op import kda
from dormouse_model.norm import RMSNorm
from dormouse_model.state import KDAState


class KDA(nn.Module):
    """`W_o ( RMSNorm_head(delta rule(q, k, v)) * sigmoid(W W x + b) )`; q and k share no weights with v.

    The delta rule starts from `state` and leaves the next one. Source: Kimi Linear, arXiv 2510.26692, section 4.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        width, inner, rank = config.model.d_model, config.inner, config.gate_rank
        self.heads, self.size = config.model.num_heads, config.model.head_dim
        self.lower_bound = config.kda.lower_bound
        self.allow_fallback = config.kda.allow_fallback
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, inner, bias=False, device=device) for _ in range(3))
        self.q_conv, self.k_conv, self.v_conv = (Taps(inner, config.kda.conv_size, device=device) for _ in range(3))
        self.decay_down = nn.Linear(width, rank, bias=False, device=device)
        self.decay_up = nn.Linear(rank, inner, bias=False, device=device)
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32, device=device))
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=torch.float32, device=device))
        self.beta_proj = nn.Linear(width, self.heads, bias=False, device=device)
        self.gate_down = nn.Linear(width, rank, bias=False, device=device)
        self.gate_up = nn.Linear(rank, inner, device=device)
        self.norm = RMSNorm(self.size, device=device)
        self.o_proj = nn.Linear(inner, width, bias=False, device=device)

    def forward(self, hidden_states: Tensor, state: KDAState | None = None) -> tuple[Tensor, KDAState]:
        """`[B, T, d]` to (`[B, T, d]`, the state after the last byte); `state` None is the start of a sequence."""
        heads = (self.heads, self.size)
        # One product and one convolution for q, k and v: their weights are apart only for the optimizer.
        weights = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        taps = torch.cat([self.q_conv.weight, self.k_conv.weight, self.v_conv.weight])
        mixed, tails = causal_conv(F.linear(hidden_states, weights), taps, None if state is None else state.tails)
        q, k, v = F.silu(mixed).unflatten(-1, (3, *heads)).unbind(-3)
        output, recurrent = kda(
            q,
            k,
            v,
            self.decay_up(self.decay_down(hidden_states)).unflatten(-1, heads),
            self.beta_proj(hidden_states).sigmoid(),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
            initial_state=None if state is None else state.recurrent,
            allow_fallback=self.allow_fallback,
        )
        gate = self.gate_up(self.gate_down(hidden_states)).unflatten(-1, heads).sigmoid()
        return self.o_proj((self.norm(output) * gate).flatten(-2)), KDAState(recurrent, tails)
