"""The reference layout: rows sorted by expert, one matrix product an expert, every operand upcast first.

It is the definition that other implementations are held to, and on a CPU it is also the faster one.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from dormouse_kernels.moe.layout import accumulation_dtype, sum_slots
from dormouse_kernels.moe.routing import Routing


class SortedRows:
    """Rows [R, n] in sorted order; expert e's are a slice. Reads the offsets back (a host sync on CUDA)."""

    def __init__(self, routing: Routing, capacity: int | None, operands: torch.dtype) -> None:
        self.accumulate = self.compute = accumulation_dtype(operands)
        self._tokens = routing.tokens
        self._experts = routing.experts.clamp_(max=routing.num_experts - 1)
        self._order = routing.order
        self._slots = routing.inverse.view_as(routing.top_k_index)
        offsets: list[int] = routing.offsets.tolist()
        rows = routing.order.numel()
        limit = rows if capacity is None else capacity
        ends = [min(stop, start + limit) for start, stop in pairwise(offsets)]
        self._live = list(zip(offsets[:-1], ends, strict=True))
        dead = [*zip(ends, offsets[1:], strict=True), (offsets[-1], rows)]
        self._dead = [(start, stop) for start, stop in dead if start < stop]

    def dispatch(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, self._tokens).to(self.compute)

    def mm(self, rows: torch.Tensor, bank: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(rows.shape[0], bank.shape[1])
        self._mm_into(out, rows, bank)
        return out

    def mm_combine(self, rows: torch.Tensor, bank: torch.Tensor, width: int) -> torch.Tensor:
        out = rows.new_empty(rows.shape[0], width)
        out[:, bank.shape[1] :].zero_()
        self._mm_into(out[:, : bank.shape[1]], rows, bank)
        return sum_slots(out, self._slots, self.accumulate)

    def _mm_into(self, out: torch.Tensor, rows: torch.Tensor, bank: torch.Tensor) -> None:
        for expert, (start, stop) in enumerate(self._live):
            if start < stop:
                torch.mm(rows[start:stop], bank[expert].to(self.compute).mT, out=out[start:stop])
        for start, stop in self._dead:
            out[start:stop].zero_()

    def wgrad(self, grad_rows: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(len(self._live), grad_rows.shape[1], rows.shape[1])
        for expert, (start, stop) in enumerate(self._live):
            if start < stop:
                torch.mm(grad_rows[start:stop].mT, rows[start:stop], out=out[expert])
            else:
                out[expert].zero_()
        return out

    def expert_sum(self, rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(len(self._live), rows.shape[1])
        for expert, (start, stop) in enumerate(self._live):
            torch.sum(rows[start:stop], 0, out=out[expert])
        return out

    def of_expert(self, values: torch.Tensor) -> torch.Tensor:
        return values.index_select(0, self._experts).to(self.accumulate)

    def of_slot(self, values: torch.Tensor) -> torch.Tensor:
        out = values.reshape(-1).index_select(0, self._order).to(self.accumulate).unsqueeze(1)
        for start, stop in self._dead:
            out[start:stop].zero_()
        return out

    def to_slot(self, rows: torch.Tensor) -> torch.Tensor:
        for start, stop in self._dead:
            rows[start:stop].zero_()
        return rows.index_select(0, self._slots.reshape(-1)).view_as(self._slots)
