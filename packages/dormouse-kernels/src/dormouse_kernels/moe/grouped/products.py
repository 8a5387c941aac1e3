"""The grouped products and their gradients over one routing, on either implementation: what autograd is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from dormouse_kernels.moe.grouped import reference
from dormouse_kernels.moe.grouped.sources import SLOT, SORTED, TOKEN
from dormouse_kernels.moe.layout import accumulation_dtype, sum_slots
from dormouse_kernels.moe.routing import Routing
from dormouse_kernels.moe.selection import TRITON

if TYPE_CHECKING:
    from types import ModuleType


@dataclass(frozen=True)
class Products:
    """Letters as in `grouped_mm`: a's rows are gathered by token or sorted, g's and the result's by slot or sorted."""

    routing: Routing
    gather: bool
    scatter: bool
    dtype: torch.dtype
    """What operands are promoted to."""
    implementation: str

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Each row of a times its expert's matrix: [R, N] in `dtype`."""
        if self.implementation == TRITON:
            return self._multiply(a, b, self._a_rows, self._g_rows)
        out = reference.multiply(self._sorted(a, self._a_rows), b, self.routing, accumulation_dtype(self.dtype))
        out = out.to(self.dtype)
        return out.index_select(0, self.routing.inverse) if self.scatter else out

    def data_gradient(self, g: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The gradient of a: g · bᵀ by rows, summed by token in the order of slots where a was gathered."""
        if self.implementation == TRITON:
            rows = self._multiply(g, b.mT, self._g_rows, SLOT if self.gather else SORTED)
            return _launches().sum_by_token(rows, self.routing, dtype) if self.gather else rows.to(dtype)
        accumulate = accumulation_dtype(self.dtype)
        rows = reference.multiply(self._sorted(g, self._g_rows), b.mT, self.routing, accumulate)
        if self.gather:
            rows = sum_slots(rows, self.routing.inverse.view_as(self.routing.top_k_index), accumulate)
        return rows.to(dtype)

    def weight_gradient(
        self, a: torch.Tensor, g: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False
    ) -> torch.Tensor:
        """Writes Σ aᵀ g over an expert's rows to out [E, K, N], or adds it there in fp32 (fp64); returns out."""
        if self.implementation == TRITON:
            launches, sources = _launches(), (self._a_rows, self._g_rows)
            tile = launches.tiles_of(self.routing, self.dtype).wgrad
            a, g = a.to(self.dtype), g.to(self.dtype)
            launches.wgrad(a, g, self.routing, out, tile, sources=sources, accumulate=accumulate)
            return out
        rows, grads = self._sorted(a, self._a_rows), self._sorted(g, self._g_rows)
        made = reference.wgrad(rows, grads, self.routing, accumulation_dtype(self.dtype))
        return out.copy_(out.to(made.dtype) + made if accumulate else made)

    @property
    def _a_rows(self) -> int:
        return TOKEN if self.gather else SORTED

    @property
    def _g_rows(self) -> int:
        return SLOT if self.scatter else SORTED

    def _sorted(self, rows: torch.Tensor, source: int) -> torch.Tensor:
        """Rows that lie at `source`, in sorted order."""
        if source == SORTED:
            return rows
        return rows.index_select(0, self.routing.tokens if source == TOKEN else self.routing.order)

    def _multiply(self, a: torch.Tensor, b: torch.Tensor, source: int, target: int) -> torch.Tensor:
        launches = _launches()
        tile = launches.tiles_of(self.routing, self.dtype).mm
        cut = self.routing.cut(tile.rows)
        return launches.multiply(a.to(self.dtype), b, self.routing, cut, tile, source=source, target=target)


def _launches() -> ModuleType:
    # imported when called, because a plain `import dormouse_kernels` must not wait for triton
    from dormouse_kernels.moe.grouped import launches

    return launches


class GroupedMm(torch.autograd.Function):
    """`Products.multiply`. Saves a and b."""

    @staticmethod
    def forward(ctx: Any, products: Products, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.products = products
        return products.multiply(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        _, need_a, need_b = ctx.needs_input_grad
        grad_a = ctx.products.data_gradient(grad, b, a.dtype) if need_a else None
        grad_b = ctx.products.weight_gradient(a, grad, torch.empty_like(b)) if need_b else None
        return None, grad_a, grad_b


class GroupedWgrad(torch.autograd.Function):
    """`Products.weight_gradient` into fresh memory. Saves a and g."""

    @staticmethod
    def forward(ctx: Any, products: Products, a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, g)
        ctx.products = products
        return products.weight_gradient(a, g, fresh_bank(products.routing, a, g, products.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, g = ctx.saved_tensors
        _, need_a, need_g = ctx.needs_input_grad
        grad_a = ctx.products.data_gradient(g, grad, a.dtype) if need_a else None
        grad_g = ctx.products.multiply(a, grad).to(g.dtype) if need_g else None
        return None, grad_a, grad_g


def fresh_bank(routing: Routing, a: torch.Tensor, g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[E, K, N], not written yet."""
    return a.new_empty(routing.num_experts, a.shape[1], g.shape[1], dtype=dtype)
