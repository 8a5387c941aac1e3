"""The padded layout: every expert's rows in a buffer [E, C, n], so that an expert pass is a few batched products.

C is the capacity; without one it is the largest count, read back from the device: the one host sync of this layout.
"""

from __future__ import annotations

import torch

from dormouse_kernels.moe.layout import accumulation_dtype, sum_slots
from dormouse_kernels.moe.routing import Routing


class PaddedRows:
    """Rows [E, C, n]; cells beyond an expert's count are padding, kept at zero wherever rows are summed."""

    def __init__(self, routing: Routing, capacity: int | None, operands: torch.dtype) -> None:
        self.compute = operands
        self.accumulate = accumulation_dtype(operands)
        self._num_experts = num_experts = routing.num_experts
        rows = routing.order.numel()
        largest = rows if capacity is None else min(capacity, rows)
        self._width = width = int(routing.counts.max()) if capacity is None and rows else largest
        device = routing.order.device
        cell = torch.arange(width, device=device)
        used = cell < routing.counts.unsqueeze(1)
        self._padding = ~used.unsqueeze(2)
        row = (routing.offsets[:-1].unsqueeze(1) + cell).clamp_(max=max(rows - 1, 0))
        self._slot_of_cell = routing.order[row.view(-1)]
        self._token_of_cell = self._slot_of_cell // max(routing.top_k, 1)
        index = routing.top_k_index.reshape(-1).to(torch.int64)
        expert = index.clamp(0, num_experts - 1)
        place = routing.inverse - routing.offsets[expert]
        live = (index == expert) & (place < width)
        # dead slots point one past the last cell, where mm_combine keeps a row of zeros
        cells = torch.where(live, expert * width + place, num_experts * width)
        self._cell_of_slot = cells.view_as(routing.top_k_index)

    def dispatch(self, x: torch.Tensor) -> torch.Tensor:
        # masked, not multiplied by zero: a NaN token must not reach the padding of another expert
        return self._cells(x.index_select(0, self._token_of_cell).to(self.compute)).masked_fill_(self._padding, 0)

    def mm(self, rows: torch.Tensor, bank: torch.Tensor) -> torch.Tensor:
        return torch.bmm(rows.to(self.compute), bank.to(self.compute).mT)

    def mm_combine(self, rows: torch.Tensor, bank: torch.Tensor, width: int) -> torch.Tensor:
        cells = self._num_experts * self._width
        buffer = torch.empty(cells + 1, width, dtype=self.compute, device=rows.device)
        buffer[:, bank.shape[1] :].zero_()
        buffer[cells].zero_()
        products = buffer[:cells].view(self._num_experts, self._width, width)[..., : bank.shape[1]]
        torch.bmm(rows.to(self.compute), bank.to(self.compute).mT, out=products)
        return sum_slots(buffer, self._cell_of_slot, self.accumulate)

    def wgrad(self, grad_rows: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.bmm(grad_rows.to(self.compute).mT, rows.to(self.compute))

    def expert_sum(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.sum(1)

    def of_expert(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.accumulate).unsqueeze(1)

    def of_slot(self, values: torch.Tensor) -> torch.Tensor:
        rows = self._cells(values.reshape(-1, 1).index_select(0, self._slot_of_cell).to(self.accumulate))
        return rows.masked_fill_(self._padding, 0)

    def to_slot(self, rows: torch.Tensor) -> torch.Tensor:
        zero = rows.new_zeros(1)
        return (
            torch.cat([rows.reshape(-1), zero])
            .index_select(0, self._cell_of_slot.reshape(-1))
            .view_as(self._cell_of_slot)
        )

    def _cells(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(self._num_experts, self._width, rows.shape[-1])
