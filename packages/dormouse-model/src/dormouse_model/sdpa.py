"""Softmax attention in KDA's place: another model, to compare with, and no fallback of it.

Projections, short convolutions, the norm a head and its gate are KDA's; the delta rule and its decay are gone. Order is
known from the convolutions and from causality alone. The past is every key and value so far: it grows.

Letters: `B` sequences, `T` bytes, `S` bytes before them, `H` heads of size `K`, `d` model, `W` taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dormouse_model.config import ModelConfig
from dormouse_model.conv import Taps, causal_conv
from dormouse_model.norm import RMSNorm
from dormouse_model.state import SDPAState


class SDPA(nn.Module):
    """`W_o ( RMSNorm_head(softmax(q k^T / sqrt(K)) v) * sigmoid(W W x + b) )`, q, k, v = conv(W x).

    `[kda]` gives the convolutions' size and the gate's rank.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        width, inner, rank = config.model.d_model, config.inner, config.gate_rank
        self.heads, self.size = config.model.num_heads, config.model.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, inner, bias=False, device=device) for _ in range(3))
        self.q_conv, self.k_conv, self.v_conv = (Taps(inner, config.kda.conv_size, device=device) for _ in range(3))
        self.gate_down = nn.Linear(width, rank, bias=False, device=device)
        self.gate_up = nn.Linear(rank, inner, device=device)
        self.norm = RMSNorm(self.size, device=device)
        self.o_proj = nn.Linear(inner, width, bias=False, device=device)

    def forward(self, hidden_states: Tensor, state: SDPAState | None = None) -> tuple[Tensor, SDPAState]:
        """`[B, T, d]` to (`[B, T, d]`, the state after the last byte); `state` None is the start of a sequence."""
        heads = (self.heads, self.size)
        weights = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        taps = torch.cat([self.q_conv.weight, self.k_conv.weight, self.v_conv.weight])
        mixed, tails = causal_conv(F.linear(hidden_states, weights), taps, None if state is None else state.tails)
        q, k, v = mixed.unflatten(-1, (3, *heads)).unbind(-3)
        seen = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
        if state is not None:
            k, v = torch.cat([state.keys.to(k.dtype), k], 1), torch.cat([state.values.to(v.dtype), v], 1)
            seen = torch.cat([state.seen, seen], 1)
        length, total = q.shape[1], k.shape[1]
        causal = torch.ones(length, total, dtype=torch.bool, device=q.device).tril(total - length)
        attended = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=causal & seen[:, None, None, :]
        ).transpose(1, 2)
        gate = self.gate_up(self.gate_down(hidden_states)).unflatten(-1, heads).sigmoid()
        return self.o_proj((self.norm(attended) * gate).flatten(-2)), SDPAState(k, v, seen, tails)
