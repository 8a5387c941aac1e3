"""The Engram layer: rows of n-gram tables as a key and a value, a gate from the hidden state, a short convolution.

    e_t = [row of the n-gram ending at t, n in orders]      k = W_K e      v = W_V e
    w = sigmoid(RMSNorm(u) . RMSNorm(k) / sqrt(d)) v        Engram(u) = w + silu(conv(RMSNorm(w)))

Letters: `B` sequences, `T` bytes, `d` model, `N` orders, `D` width of a row, `R` rows of all tables, `W` taps.
Source: arXiv 2601.07372, section 2, with raw bytes for tokens and one hash an order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dormouse_model.config import EngramSection
from dormouse_model.conv import Taps, causal_conv
from dormouse_model.engram.ngrams import NONE, ngram_rows
from dormouse_model.engram.tables import read_rows
from dormouse_model.norm import RMSNorm


class Recall(NamedTuple):
    """What the bytes look up, the same in every iteration: `key` (normalised) and `value` [B, T, d]."""

    key: Tensor
    value: Tensor


class Engram(nn.Module):
    """`recall` reads the tables once for given bytes; `forward` lets an iteration's hidden state take from it.

    The tables stand one below the other in one parameter `tables` [R, D], in the order of `config.orders`.
    """

    def __init__(self, d_model: int, config: EngramSection, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        self.sparse_grad = False
        """Whether the gradient of `tables` is sparse, of the rows read alone: for an optimizer that knows such ones."""
        sizes = config.sizes
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        """First row of each order's table."""
        width = len(config.orders) * config.dim
        self.tables = nn.Parameter(torch.empty(sum(sizes), config.dim, device=device))
        self.key = nn.Linear(width, d_model, bias=False, device=device)
        self.value = nn.Linear(width, d_model, bias=False, device=device)
        self.query_norm = RMSNorm(d_model, device=device)
        self.key_norm = RMSNorm(d_model, device=device)
        self.conv_norm = RMSNorm(d_model, device=device)
        self.conv = Taps(d_model, config.conv_size, device=device)

    def rows(self, ids: Tensor, before: Tensor) -> Tensor:
        """Rows of `tables` that each byte reads, int64 [B, T, N], `NONE` for an n-gram that is not all there.

        `ids` [B, T] bytes; `before` as in `ngram_rows`, of `config.context` bytes.
        """
        found = [
            ngram_rows(ids, before, order, self.config.rows, self.config.hash_seed) for order in self.config.orders
        ]
        rows = torch.stack(found, -1)
        return torch.where(rows == NONE, NONE, rows + torch.tensor(self.starts, device=rows.device))

    def no_bytes(self, batch_size: int, device: torch.device | str) -> Tensor:
        """The bytes before the start of `batch_size` sequences: none, int16 [B, `config.context`]."""
        return torch.full((batch_size, self.config.context), NONE, dtype=torch.int16, device=device)

    def recall(self, ids: Tensor, before: Tensor | None = None) -> tuple[Recall, Tensor]:
        """Keys and values of `ids`, a function of the bytes up to each alone, and the `before` of what follows.

        `before` None is the start of the sequences.
        """
        if before is None:
            before = self.no_bytes(ids.shape[0], ids.device)
        read = read_rows(self.tables, self.rows(ids, before), sparse_grad=self.sparse_grad).flatten(-2)
        last = torch.cat([before, ids.to(before.dtype)], 1)[:, ids.shape[1] :]
        return Recall(self.key_norm(self.key(read)), self.value(read)), last

    def forward(self, u: Tensor, recall: Recall, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """`u` [B, T, d] to (`[B, T, d]`, the next tail); `tail` [B, W-1, d] are the convolution's last inputs."""
        affinity = (self.query_norm(u) * recall.key).sum(-1, keepdim=True)
        taken = (affinity * u.shape[-1] ** -0.5).sigmoid() * recall.value
        mixed, tail = causal_conv(self.conv_norm(taken), self.conv.weight, tail)
        return taken + F.silu(mixed), tail
